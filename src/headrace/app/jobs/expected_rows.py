"""Rows such as a job will write, from which an output learns its columns and types where the job finishes no row."""

from __future__ import annotations

from headrace.engines.tasks import task_named
from headrace.errors import attempted
from headrace.io.base import Source, typed_columns
from headrace.io.formats.cells import is_integers, row_of_nulls
from headrace.jobs.answer_form import AnswerForm
from headrace.jobs.pipeline import candidates
from headrace.jobs.pipeline.inputs import Columns
from headrace.jobs.planning.columns import first_rows
from headrace.jobs.settings import JobSettings
from headrace.records import Ok, Record

_FIRST_ROWS = 64
_FIRST_CHARS = 1 << 20
"""Characters or bytes of kept values, after which no more rows are taken: they are encoded to learn their types."""
_NUMBERS = {"int8": "int8", "uint8": "uint8", "binary": "int8", "ubinary": "uint8"}
"""The types of numbers of vectors by ``output_dtype``, those of float16 and float32 apart."""


def expected_rows(source: Source, columns: Columns, settings: JobSettings, form: AnswerForm | None) -> list[Ok]:
    """Rows as the output would have them, if their engine gave answers: the first ones, or one without values."""
    task = task_named(settings.config.task)
    answer = task.example if settings.documents_column is None else candidates.EXAMPLE
    if "vector" in task.outputs:
        answer = _in_arrays(answer, _NUMBERS.get(str(settings.config.engine_options.get("output_dtype")), "float32"))
    if isinstance(answer, dict):
        is_parsed = form is not None and form.validator is not None
        answer = answer | ({"parsed": None} if is_parsed else {})
        answer |= {"labels": [""], "scores": [0.0]} if settings.config.engine_options.get("top_labels") else {}
    answer = None if settings.finish is not None else [answer] if settings.n > 1 else answer
    rows = _first(source, columns)
    if not rows:
        there = typed_columns(source)
        identity = there.get(columns.id) if columns.id is not None else None
        is_text = columns.id is not None and not is_integers(identity)
        rows = [Record(0, "" if is_text else 0, columns.kept(Record(0, 0, row_of_nulls(there))))]
    return [Ok(row, answer) for row in rows]


def _first(source: Source, columns: Columns) -> list[Record]:
    found, length = list[Record](), 0
    for given in first_rows(source)[:_FIRST_ROWS]:
        row = attempted(columns.identify, given)
        if isinstance(row, Record):
            found.append(row)
            length += sum(len(value) for value in row.data.values() if isinstance(value, (str, bytes)))
        if length > _FIRST_CHARS:
            break
    return found


def _in_arrays(answer: object, numbers: str) -> object:
    """The answer with vectors as Headrace's engines give them, and not as a user's function may."""
    import numpy

    if isinstance(answer, dict):
        return {name: _in_arrays(inner, "int32" if name == "indices" else numbers) for name, inner in answer.items()}
    return numpy.array(answer, numbers)
