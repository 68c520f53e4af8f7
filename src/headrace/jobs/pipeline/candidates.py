"""Rows with a query and a list of documents: each document is scored with the query, and the row gets their ranking."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.engines.base import Chunks, Prepared, PreparedRecords
from headrace.errors import RecordError
from headrace.jobs.pipeline.work import StepAnswer
from headrace.records import kind_of, text_refusal

COLUMN = "ranking"
"""The column of the outputs."""
EXAMPLE = {"scores": [0.0], "indices": [0]}
"""An output: the score of each document, and the places of the documents, best first."""
FIELDS = tuple(EXAMPLE)


class QueryDocuments(NamedTuple):
    query: object
    documents: Sequence[object]


def documents_of(value: object, column: str) -> list[object]:
    """The documents in a column of a row. Raises RecordError: it is no list of texts."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, (list, tuple)):
        given = "null" if value is None else kind_of(value)
        raise RecordError(f"column {column!r} is {given}; it must be a list of texts (``documents_column``)")
    for number, document in enumerate(found):
        if refusal := text_refusal(document, f"document {number} in column {column!r}"):
            raise refusal
    return list(found)


def prepare_candidates(
    prepare: Callable[[Sequence[object]], PreparedRecords], inputs: Sequence[QueryDocuments]
) -> list[Prepared[Chunks[object]] | Exception | StepAnswer]:
    """Each row with its documents as parts, which may be in different batches; without documents, its output."""
    pairs = [(one.query, document) for one in inputs for document in one.documents]
    answers = iter(prepare(pairs) if pairs else ())
    return [_joined(list(itertools.islice(answers, len(one.documents)))) for one in inputs]


def _joined(answers: Sequence[Prepared[object] | Exception]) -> Prepared[Chunks[object]] | Exception | StepAnswer:
    if not answers:
        return StepAnswer(ranking((), ()))
    ready = [answer for answer in answers if isinstance(answer, Prepared)]
    if len(ready) < len(answers):
        return next(answer for answer in answers if isinstance(answer, Exception))
    costs = [one.cost for one in ready]
    chunks = Chunks([one.payload for one in ready], costs, [1] * len(ready), ranking)
    return Prepared(chunks, sum(costs), any(one.truncated for one in ready))


def ranking(outputs: Sequence[float], weights: Sequence[int]) -> dict[str, list[float] | list[int]]:  # noqa: ARG001
    """The output of a row, from the score of each document. Equal scores stay in order, and NaN is last."""
    scores = [float(score) for score in outputs]
    best_first = sorted(range(len(scores)), key=lambda n: (scores[n] != scores[n], -scores[n]))
    return {"scores": scores, "indices": best_first}
