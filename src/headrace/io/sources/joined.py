"""The rows of an input with the outputs of earlier steps, which were written in the order of the input.

Row n of a step's output belongs to the n-th record that is not among its dead letters. So no positions are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from headrace.errors import JobError, text_of, tried
from headrace.io.base import Chunk, Source, needing
from headrace.io.sources.opening import open_source
from headrace.io.storage.locations import exists, is_remote
from headrace.records import Failed, JoinedRow, Json, Record


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The finished output of a step."""

    name: str
    column: str
    file: Path
    errors: Path
    """Its dead letters; missing if there are none."""
    format: str


class JoinedSource:
    """The rows of a source, with the outputs of earlier steps as columns.

    A record that failed in a step fails here too, with the same reason.

    Args:
        steps: the earlier steps, in their order.
        facts: what identifies the steps, as JSON.
        as_answer: pass on the last step's output as the record's answer, not as a column.
        preview: the outputs do not exist yet; null stands for each.
    """

    def __init__(
        self,
        source: Source,
        steps: Sequence[StepOutput],
        facts: Mapping[str, object],
        *,
        as_answer: bool = False,
        preview: bool = False,
    ) -> None:
        self._source = source
        self._steps = steps[-1:] if as_answer else steps
        self._all_steps = steps
        self._facts = facts
        self._as_answer = as_answer
        self._preview = preview
        self.total_bytes = source.total_bytes
        self.total_records = source.total_records

    def preview(self) -> JoinedSource:
        """The same rows with null for the outputs of the steps."""
        return self._of(self._source, preview=True)

    def needing(self, names: Sequence[str]) -> JoinedSource:
        """The same rows, which may lack other columns than these where those cannot be read."""
        return self._of(needing(self._source, names), preview=self._preview)

    def _of(self, source: Source, *, preview: bool) -> JoinedSource:
        return JoinedSource(source, self._all_steps, self._facts, as_answer=self._as_answer, preview=preview)

    def describe(self) -> Mapping[str, object]:
        """The input's description, with the steps."""
        return {**self._source.describe(), "steps": self._facts}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Rows that are not done, as the source has them.

        Raises:
            JobError: the output of a step is missing or has changed.
        """
        outputs = [] if self._preview else [_StepOutputs(step) for step in self._steps]
        for chunk in self._source.chunks(next_todo):
            joined = Chunk.of((self._joined(record, outputs) for record in chunk.records), 0)
            yield replace(chunk, records=joined.records, failures=[*chunk.failures, *joined.failures])

    def _joined(self, record: Record, outputs: Sequence[_StepOutputs]) -> Record | Failed:
        columns: dict[str, object] = {}
        for step, output in zip(self._steps, outputs, strict=not self._preview):
            value = output.at(record)
            if isinstance(value, Failed):
                return value
            columns[step.column] = value
        if self._preview:
            columns = dict.fromkeys(step.column for step in self._steps)
        answer = (next(iter(columns.values())),) if self._as_answer else ()
        row = tried(JoinedRow, record.data, {} if self._as_answer else columns, *answer)
        if isinstance(row, Exception):  # of the user's own mapping
            return Failed(record, type(row).__name__, f"the row cannot be read: {text_of(row)}")
        return Record(record.position, record.id, row)


class _StepOutputs:
    """The outputs and dead letters of a step, by ascending position."""

    def __init__(self, step: StepOutput) -> None:
        self._step = step
        self._letters = _letters(step.errors)
        self._letter = next(self._letters, None)
        self._failed = 0
        """Dead letters before the position that was asked for last."""
        self._wanted = 0
        self._numbers: _Numbers = {}
        """Types of the numbers in the vectors that the step wrote."""
        self._rows = self._read()

    def at(self, record: Record) -> object:
        """The step's output for a record; a `Failed` if it has none. Raises JobError: the output has changed."""
        position = record.position
        while self._letter is not None and self._letter["position"] < position:
            self._failed += 1
            self._letter = next(self._letters, None)
        if self._letter is not None and self._letter["position"] == position:
            return _failed(record, self._step.name, self._letter)
        self._wanted = position - self._failed
        for number, row in self._rows:
            if number == self._wanted:
                return self._value(row)
        raise JobError(
            f"{self._step.file} has no row for record {position}: it has changed since step {self._step.name!r} "
            "wrote it; start again with ``overwrite=True``"
        )

    def _value(self, row: Mapping[str, object]) -> object:
        value = row.get(self._step.column)
        if isinstance(value, dict):
            return {name: _vector(inner, self._numbers.get(name)) for name, inner in value.items()}
        return _vector(value, self._numbers.get(""))

    def _read(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        step = self._step
        if not exists(step.file):
            raise JobError(f"{step.file}, the output of step {step.name!r}, is missing; run again to compute it again")
        self._numbers = _numbers(step) if step.format == "parquet" else {}
        file = str(step.file) if is_remote(step.file) else step.file
        rows = needing(open_source(file, step.format), [step.column])
        for chunk in rows.chunks(lambda position: max(position, self._wanted)):
            for record in chunk.records:
                yield record.position, record.data


_Numbers: TypeAlias = Mapping[str, str]
"""Types of numbers of a vector (by ""), or of the vectors in an object, by their names."""


def _numbers(step: StepOutput) -> _Numbers:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with step.file.open("rb") as stream:
        kind = pq.read_schema(stream).field(step.column).type
    found = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {"": kind}
    vectors = {
        name: kind for name, kind in found.items() if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    }
    numbers = {name: _NUMBERS.get(str(kind.value_type)) for name, kind in vectors.items()}
    if "" in vectors and not pa.types.is_list(vectors[""]):
        numbers[""] = numbers[""] or _OF_VECTORS.get(str(vectors[""].value_type))
    return {name: known for name, known in numbers.items() if known is not None}


_NUMBERS = {
    "float": "float32", "int32": "int32", "int16": "int16", "int8": "int8",
    "uint64": "uint64", "uint32": "uint32", "uint16": "uint16", "uint8": "uint8",
}  # fmt: skip
"""Types of the numbers of arrays by those of Arrow. Lists of Python's numbers have others."""
_OF_VECTORS = {"double": "float64", "int64": "int64"}
"""Those that only vectors of one length tell from such lists."""


def _vector(value: object, numbers: str | None) -> object:
    """A vector as the step made it; other values as they are."""
    if numbers is None or not isinstance(value, list):
        return value
    import numpy

    return numpy.asarray(value, numbers)


def _letters(errors: Path) -> Iterator[dict[str, Json]]:
    """The dead letters of a step, which are in the order of the input."""
    if not exists(errors):
        return
    with errors.open("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _failed(record: Record, step: str, letter: Mapping[str, object]) -> Failed:
    attempts = letter.get("attempts")
    return Failed(
        Record(record.position, letter.get("id"), record.data),
        str(letter.get("reason")),
        f"step {step}: {letter.get('message')}",
        attempts if isinstance(attempts, int) else 1,
        has_id=True,
    )
