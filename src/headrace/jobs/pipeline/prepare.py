"""The second stage: pick the id and the input of each row, and prepare the inputs for the engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from headrace.batching.callables import unfinished
from headrace.batching.pending import own_copy
from headrace.batching.policy.cost import MOST_COST, checked_cost
from headrace.batching.results import checked_results
from headrace.columns import Column, PayloadList, PreparedColumn, RowTable, values_of
from headrace.engines.base import Engine, Placed, Prepared
from headrace.engines.capabilities import ColumnPreparer
from headrace.engines.choosing.served import ServedModel
from headrace.engines.profile import profile_of
from headrace.engines.requests.formed import FormedRequest, Try
from headrace.engines.requests.templates import field_text, prompt_of, template_fields
from headrace.errors import (
    BadResultError,
    BrokenOffError,
    EngineDeadError,
    JobError,
    ProcessTimeoutError,
    RecordError,
    StoppedEarly,
    attempted,
)
from headrace.events import StageDone
from headrace.extras import lazy
from headrace.io.base import Chunk
from headrace.io.formats.arrow_memory import of_numbers
from headrace.jobs.answer_form import AnswerForm
from headrace.jobs.pipeline import arrow
from headrace.jobs.pipeline.blocks import Block, Labels
from headrace.jobs.pipeline.candidates import QueryDocuments, documents_of, prepare_candidates
from headrace.jobs.pipeline.dedupe import RepeatCounter, key_of
from headrace.jobs.pipeline.memory_budget import value_bytes
from headrace.jobs.pipeline.retries import Retry
from headrace.jobs.pipeline.samples import Samples
from headrace.jobs.pipeline.suspects import MOST_IN_A_ROW
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import PreparedChunk, StepAnswer, Work, unreadable
from headrace.jobs.settings import ModelChoice, OnEmpty
from headrace.records import Failed, Record, Unreadable, kept_value, kind_of, text_refusal, value_at
from headrace.wording import shown

if TYPE_CHECKING:
    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray
else:
    numpy = lazy("numpy")

WHOLE = "*"
"""In the place of a column: the whole row."""
_ROWS = 64
"""Records prepared per time limit if the engine has no batch size."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns a job reads."""

    text: str
    id: str | None
    """None to use positions as ids."""
    text_only: bool = True
    """Whether the input must be text; otherwise the engine checks it."""
    pair: str | None = None
    """Column of the second text of a pair."""
    documents: str | None = None
    """Column of the documents that are ranked for the text."""
    template: str | None = None
    """Makes the text or the chat from several columns, such as "Q: {question}"; None to use `text`."""
    keep: tuple[str, ...] = ()
    """Columns to copy to the output."""
    choice: ModelChoice | None = None
    """Which records the step computes; None for all."""
    splits: bool = False
    """Whether a field of the template is split where the prompt is too long."""
    on_empty: OnEmpty = "keep"
    exact: bool = False
    """Whether the output takes the columns to copy as a table has them, not only as Python objects."""
    else_row: bool = False
    """Whether the input is the whole row where there is no column `text`."""
    row: tuple[str, ...] = ()
    """The columns of the row that is the input; empty for all."""
    else_array: bool = False
    """Whether the input is the column of arrays where there is no column `text`."""
    arrays: bool = False
    """Whether the engine takes columns of numbers, and of lists of numbers, as they are."""
    served: ServedModel | None = None
    """The model and its adapters; None where it has none, and a request chooses nothing by its model."""

    def inputs(self) -> tuple[str, ...]:
        """The names that the input for the engine is made of: columns, or `column.key` of mappings in them."""
        if self.template is not None:
            return template_fields(self.template)
        if self.is_row:
            return self.row
        return tuple(name for name in (self.text, self.pair, self.documents) if name is not None)

    @property
    def are_plain(self) -> bool:
        """Whether the input is made of whole columns, and of every row."""
        return self.template is None and self.choice is None and not self.is_row

    @property
    def is_row(self) -> bool:
        return self.else_row and self.text == WHOLE

    def used(self) -> tuple[str, ...]:
        """The names of all columns that are looked at; none if these are all."""
        if "*" in self.keep or (self.is_row and not self.row):
            return ()
        others = (self.id, None if self.choice is None else self.choice.column)
        return tuple(dict.fromkeys((*self.inputs(), *(name for name in others if name is not None), *self.keep)))

    def identify(self, record: Record) -> Record:
        """The part of a record that its output needs: position, id and the columns to copy.

        Raises:
            RecordError: the id is missing, or neither text nor an integer.
        """
        return Record(record.position, self.id_of(record), self.kept(record))

    def id_of(self, record: Record) -> object:
        """The id of a record. Raises RecordError: it is missing, or neither text nor an integer."""
        if self.id is None:
            return record.id
        value = _value(record, self.id)
        if id_text(value) is None:
            raise _id_refusal(value, self.id)
        return value

    def input_of(self, record: Record) -> object:
        """The input for the engine.

        Rows that `table_columns` takes in columns do not come here: it must not take what is refused here.

        Raises:
            RecordError: a column is missing; with `text_only` the value is null, no text or not valid Unicode; it is
                empty, and `on_empty` refuses that; or it is a request for another model.
        """
        value = self._input_of(record)
        if self.served is not None and (refusal := self.served.refusal(value)):
            raise refusal
        if self.on_empty == "error" and is_empty(value):
            raise RecordError(f"the text of {' and '.join(map(repr, self.inputs()))} is empty (``on_empty=error``)")
        return value

    def _input_of(self, record: Record) -> object:
        if self.template is not None:
            return prompt_of(self.template, self.fields_of(record), splits=self.splits)
        if self.is_row:
            return {name: _value(record, name) for name in self.row or record.data}
        value = _value(record, self.text)
        if self.text_only:
            _check_text(value, self.text)
        if self.documents is not None:
            return QueryDocuments(value, documents_of(_value(record, self.documents), self.documents))
        if self.pair is None:
            return value
        second = _value(record, self.pair)
        if self.text_only:
            _check_text(second, self.pair)
        return value, second

    def fields_of(self, record: Record) -> dict[str, str]:
        """The text of each field of the template. Raises RecordError: see `input_of`."""
        names = template_fields(self.template) if self.template is not None else ()
        return {name: field_text(record.data, name) for name in names}

    def kept(self, record: Record) -> Mapping[str, object] | None:
        """The columns to copy; null for one that the record lacks. Raises RecordError: one cannot be read."""
        return {name: kept_value(record.data, name, exact=self.exact) for name in self.keep} if self.keep else None


def is_empty(value: object) -> bool:
    """Whether an input is an empty text, or a pair with one."""
    return "" in value if type(value) is tuple else type(value) is str and not value


def _takes(choice: ModelChoice, record: Record) -> bool:
    """Whether the step computes the record."""
    value = _value(record, choice.column)
    if value not in choice.models:
        raise RecordError(
            f"column {choice.column!r} is {shown(value)}, which is no model of this job: {', '.join(choice.models)}"
        )
    return value == choice.model


def _value(record: Record, column: str) -> object:
    value = value_at(record.data, column)
    if type(value) is Unreadable:
        raise value.refusal(column)
    return value


def id_text(value: object) -> str | None:
    """The text that an id is compared by: 1 and "1" are the same id. None if the value is no id."""
    if type(value) is str and value.isascii():  # the common case first
        return value
    if type(value) is int:
        try:
            return str(value)
        except ValueError:  # Python writes no integer of more than 4,300 digits
            return None
    return value if isinstance(value, str) and text_refusal(value) is None else None


def _check_text(value: object, column: str) -> None:
    if type(value) is str and value.isascii():  # the common case first
        return
    if refusal := text_refusal(value, f"column {column!r}"):
        raise refusal


def _id_refusal(value: object, column: str) -> RecordError:
    if isinstance(value, str) and (refusal := text_refusal(value, f"column {column!r}")):
        return refusal
    if type(value) is int:
        return RecordError(f"column {column!r} is an integer of {value.bit_length():,} bits, too long to be written")
    given = "null" if value is None else f"{shown(value)}, {kind_of(value)}"
    hint = "; pandas makes floats of integers if some are missing" if isinstance(value, float) else ""
    return RecordError(
        f"column {column!r} is {given}; an id is an integer or text: convert the column, or name another with "
        f'``id_column`` ("" for positions){hint}'
    )


class InTime:
    """`prepare_all` with a time limit for each batch of records.

    A batch that takes longer is split in halves until the record that blocks `prepare` fails alone. Each call has its
    own thread: one that hangs cannot be ended, and its result is ignored.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._in_a_row = 0

    @property
    def limits(self) -> bool:
        return self._timeout_s is not None

    def prepare(self, engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The prepared form of each input, or its error.

        Raises:
            BrokenOffError: the engine died, or hangs on every record.
        """
        if self._timeout_s is None:
            return prepare_all(engine, inputs)
        rows = profile_of(engine).batch_size or _ROWS
        pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        return [answer for piece in pieces for answer in self._within(engine, piece, self._timeout_s)]

    def _within(self, engine: Engine, inputs: Sequence[object], timeout_s: float) -> list[Prepared[object] | Exception]:
        future: Future[list[Prepared[object] | Exception]] = Future()
        threading.Thread(target=_answer, args=(future, engine, inputs), name="headrace-prepare", daemon=True).start()
        try:
            found = future.result(timeout_s)
        except TimeoutError:
            if future.done():  # raised by the engine, not by the wait
                raise
        else:
            self._in_a_row = 0
            return found
        if half := len(inputs) // 2:
            return self._within(engine, inputs[:half], timeout_s) + self._within(engine, inputs[half:], timeout_s)
        self._in_a_row += 1
        limit = f"{timeout_s:g} s (``engine_timeout_s``)"
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"the engine's prepare had no result after {limit} for {self._in_a_row} records in a row: the engine "
                "hangs; finished records are kept; run again to continue"
            )
        return [ProcessTimeoutError(f"the engine's prepare had no result after {limit}")]


def listed(answers: Sequence[Prepared[object] | Exception], inputs: Sequence[object]) -> PreparedColumn:
    """What an engine's `prepare` gave for these inputs, as a column."""
    errors = {row: answer for row, answer in enumerate(answers) if isinstance(answer, Exception)}
    good = [answer for answer in answers if isinstance(answer, Prepared)]
    payloads = [answer.payload if isinstance(answer, Prepared) else None for answer in answers]
    costs = [answer.cost if isinstance(answer, Prepared) else 0 for answer in answers]
    same = all(payload is value for payload, value in zip(payloads, inputs, strict=True))
    return PreparedColumn(
        PayloadList(payloads, 0 if same else value_bytes(payloads)),
        numpy.array(costs),
        errors,
        sum(answer.truncated for answer in good),
    )


def _answer(future: Future[list[Prepared[object] | Exception]], engine: Engine, inputs: Sequence[object]) -> None:
    found = attempted(prepare_all, engine, inputs)
    if isinstance(found, BaseException):
        future.set_exception(found)  # raised again in the waiting thread
    else:
        future.set_result(found)


def prepare_all(engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    """The prepared form of each input, or its error.

    If the call fails, each input is prepared alone. If it returns something other than one entry per input, all fail.

    Raises:
        BrokenOffError: the engine died, which is not a record failure.
    """
    found = attempted(_prepared, engine, inputs)
    if not isinstance(found, BaseException):
        return found
    if isinstance(found, EngineDeadError):
        raise BrokenOffError(
            f"the engine cannot continue: {found}; finished records are kept; run again to continue"
        ) from found
    if len(inputs) == 1 or isinstance(found, BadResultError):
        return [own_copy(found) for _ in inputs]
    return [prepare_all(engine, [value])[0] for value in inputs]


def _prepared(engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    answers: object = engine.prepare(list(inputs))  # it may change the list
    if type(answers) is not list or len(answers) != len(inputs):
        answers = checked_results(answers, len(inputs), "prepare")
    return [answer if _is_sound(answer) else _checked(answer) for answer in answers]


def _is_sound(answer: object) -> TypeGuard[Prepared[object]]:
    """Whether it is what nearly all answers are: prepared, with a whole number as cost."""
    return type(answer) is Prepared and type(answer.cost) is int and 0 <= answer.cost <= MOST_COST


def _checked(answer: object) -> Prepared[object] | Exception:
    if isinstance(answer, BaseException):
        return answer if isinstance(answer, Exception) else own_copy(answer)
    if not isinstance(answer, Prepared):
        return unfinished("the engine's prepare", answer) or BadResultError(
            f"the engine's prepare returned {type(answer).__name__} for a record; "
            "it must return Prepared or an exception"
        )
    error = attempted(checked_cost, answer.cost, type(answer.payload))  # comparing a cost of the engine's own type
    return own_copy(error) if isinstance(error, BaseException) else answer


class TableColumns(NamedTuple):
    """What a job takes of a table by column."""

    texts: Sequence[pa.Array]
    ids: pa.Array
    kept: Mapping[str, pa.Array]


def table_columns(columns: Columns, table: RowTable | None) -> TableColumns | None:
    """What a job takes of a table by column; None if its rows must be read."""
    if table is None or not columns.are_plain:
        return None
    names = columns.inputs()
    found = [text for name in names if (text := arrow.plain(arrow.column_at(table, name))) is not None]
    texts = [text for text in found if arrow.is_text(text) or (columns.arrays and arrow.is_numeric(text))]
    if len(texts) < len(names) or (columns.on_empty == "error" and any(map(arrow.count_empty, texts))):
        return None
    if not columns.text_only and any(text.null_count for text in texts):  # the engine decides
        return None
    ids = of_numbers(table.positions) if columns.id is None else arrow.plain(arrow.column_at(table, columns.id))
    if ids is None or ids.null_count or not arrow.holds_ids(ids):
        return None
    kept = {name: arrow.column_at(table, name) for name in columns.keep}
    if not all(arrow.can_be_kept(one, columns.exact, table.typed) for one in kept.values()):
        return None
    return TableColumns(texts, ids, kept)


class _Selected(NamedTuple):
    """The rows of a chunk that are to be run."""

    records: Sequence[Record]
    places: NDArray[numpy.int64]
    labels: Labels
    inputs: Column
    """What the engine gets for each row."""
    errors: Mapping[int, Exception] = {}
    """By row: why it cannot be prepared."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares records: user code, columns, then the engine."""

    columns: Columns
    engine: Engine
    user: UserCode
    dedupe: bool | None
    in_time: InTime = field(default_factory=InTime)
    """Applies the time limit of the engine's `prepare`."""
    repeats: RepeatCounter | None = None
    """Counts equal inputs; None where it makes no difference."""
    in_blocks: bool = False
    """Whether rows stay together in blocks."""
    preparer: ColumnPreparer | None = None
    """Prepares a column at once; None if the engine cannot."""
    needs_keys: threading.Event = field(default_factory=threading.Event)
    """Set once an input was prepared for which equal ones have one answer: these are compared one by one."""
    form: AnswerForm | None = None
    """The form that each answer must have."""
    samples: Samples | None = None
    """How many answers each record has; None for one."""
    place: Callable[[int], int] | None = None
    """Numbers positions in the order of work; None if they are in order themselves."""

    def prepare(self, chunk: Chunk) -> tuple[PreparedChunk, StageDone]:
        """Prepare a chunk of the input. Runs on a worker thread."""
        if self.in_blocks and chunk.records and not self.needs_keys.is_set():
            found = self._prepare_blocks(chunk)
            if not self.needs_keys.is_set():
                return found
        return self._prepare(chunk.records, chunk.failures, {})

    def prepare_again(self, again: Sequence[Retry]) -> tuple[PreparedChunk, StageDone]:
        """Prepare records for a retry."""
        return self._prepare([item.record for item in again], (), {a.record.position: a for a in again})

    def _prepare(
        self, rows: Sequence[Record], failures: Sequence[Failed], again: Mapping[int, Retry]
    ) -> tuple[PreparedChunk, StageDone]:
        since = time.monotonic(), time.thread_time()
        done = PreparedChunk(answered=[unreadable(failed) for failed in failures])
        attempts = {position: retry.attempt for position, retry in again.items()}
        selected, inputs = self._select(rows, attempts, done)
        sees = self.user.finishes
        in_tokens = profile_of(self.engine).counts_tokens
        draws = profile_of(self.engine).draws
        tries = [again[row.position].tries if row.position in again else () for row, _, _ in selected]
        rows_asked = [row for row, _, _ in selected]
        asked = [self._asked(value, one, row) for value, one, row in zip(inputs, tries, rows_asked, strict=True)]
        answers = self._answers(asked) if asked else []
        if self.samples is not None:
            answers = [self._sampled(*one) for one in zip(answers, inputs, rows_asked, strict=True)]
        for (row, mapped, kept), value, prepared in zip(selected, inputs, answers, strict=True):
            attempt = attempts.get(row.position, 1) if attempts else 1
            if isinstance(prepared, Exception):
                done.refuse(row, kept.id, prepared, attempt)
                continue
            if isinstance(prepared, StepAnswer):
                done.answered.append((Work(kept, row.data), prepared))
                continue
            # Equal requests that are sampled have different answers.
            merges = prepared.greedy if draws or self.dedupe is None else True
            tries_before = again[row.position].tries if row.position in again else ()
            key = key_of(value) if merges and self.dedupe is not False and not tries_before else None
            cost, payload = prepared.cost, prepared.payload
            size = 0 if payload is value else value_bytes(payload)
            done.work.append(
                Work(kept, row.data, payload, cost, attempt, mapped.data if sees else None, key, size, tries_before)
            )
            done.tokens += cost if in_tokens else 0
            done.truncated += prepared.truncated
            if self.samples is None:
                done.split += prepared.parts > 0
                done.chunks += prepared.parts
        return done, self._event(done, len(rows), inputs, since)

    def _answers(self, asked: Sequence[object]) -> Sequence[Prepared[object] | Exception | StepAnswer]:
        prepare = functools.partial(self.in_time.prepare, self.engine)
        if self.columns.documents is None:
            return prepare(asked)
        return prepare_candidates(prepare, [one for one in asked if isinstance(one, QueryDocuments)])

    def _asked(self, value: object, tries: tuple[Try, ...], row: Record) -> object:
        """The input as the engine takes it: with the form of its answer, and its place."""
        profile = profile_of(self.engine)
        if self.form is not None:
            formed = FormedRequest(value, self.form.structure, self.form.words, tries)
            value = formed if profile.holds_forms else formed.spoken()
        return Placed(value, row.position) if profile.draws else value

    def _sampled(
        self, answer: Prepared[object] | Exception | StepAnswer, value: object, row: Record
    ) -> Prepared[object] | Exception | StepAnswer:
        """The record as parts, one for each of its answers."""
        if self.samples is None or not isinstance(answer, Prepared):
            return answer

        def ask(tries: tuple[Try, ...]) -> Prepared[object] | Exception:
            return self.in_time.prepare(self.engine, [self._asked(value, tries, row)])[0]

        return self.samples.prepared(answer, ask)

    def _event(self, done: PreparedChunk, rows: int, inputs: Sequence[object], since: tuple[float, float]) -> StageDone:
        """What preparing these inputs took, and what was seen in them."""
        compared = repeated = 0
        looks = self.repeats is not None and not self.repeats.ends
        empty = sum(map(is_empty, inputs)) if isinstance(inputs, list) else arrow.count_empty(inputs)
        if self.repeats is not None and looks:
            texts = inputs if isinstance(inputs, list) or arrow.is_text(inputs) else ()
            hashes = [hash(value) for value in values_of(texts) if type(value) is str]
            compared, repeated = self.repeats.look(hashes, len(inputs))
        (started, cpu), ended = since, time.monotonic()
        return StageDone(
            "prepare", rows, ended - started, ended, tokens=done.tokens, truncated=done.truncated,
            cpu_s=time.thread_time() - cpu, compared=compared, repeated=repeated,
            split=done.split, chunks=done.chunks, empty=empty,
        )  # fmt: skip

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _prepare_blocks(self, chunk: Chunk) -> tuple[PreparedChunk, StageDone]:
        since = time.monotonic(), time.thread_time()
        done = PreparedChunk(answered=[unreadable(failed) for failed in chunk.failures])
        columns = table_columns(self.columns, chunk.table)
        selected = self._from_rows(chunk.records, done) if columns is None else self._from_table(chunk, columns)
        if selected.records:
            prepared = self._prepared_column(selected.inputs)
            if selected.errors:
                costs = prepared.costs.copy()
                costs[list(selected.errors)] = 0
                prepared = replace(prepared, costs=costs, errors={**prepared.errors, **selected.errors})
            self._cut(selected, prepared, done)
        inputs: Column = selected.inputs
        if selected.errors:
            inputs = [value for row, value in enumerate(values_of(inputs)) if row not in selected.errors]
        return done, self._event(done, len(chunk.records), inputs, since)

    def _from_table(self, chunk: Chunk, columns: TableColumns) -> _Selected:
        """The rows of a chunk, selected by column."""
        texts, ids, kept = columns
        assert chunk.table is not None, "it has columns"
        errors = {row: self._refusal(chunk.records[row]) for text in texts for row in arrow.nulls(text)}
        texts = [text.fill_null("") if text.null_count else text for text in texts]
        inputs = texts[0] if len(texts) == 1 else list(zip(*map(values_of, texts), strict=True))
        positions = chunk.table.positions
        places = positions if self.place is None else self._places(positions.tolist())
        return _Selected(chunk.records, places, Labels(ids, positions, kept or None, chunk.table.typed), inputs, errors)

    def _refusal(self, record: Record) -> Exception:
        """Why a row without a text cannot be prepared."""
        found = attempted(self.columns.input_of, record)
        return found if isinstance(found, Exception) else RecordError("the record has no text")

    def _from_rows(self, records: Sequence[Record], done: PreparedChunk) -> _Selected:
        """The rows of a chunk, selected one by one; those that cannot be are refused."""
        selected, inputs = self._select(records, {}, done)
        kept: dict[str, Column] | None = None
        if self.columns.keep:
            kept = {name: [own.data[name] for _, _, own in selected] for name in self.columns.keep}
        rows = [row for row, _, _ in selected]
        positions = numpy.array([row.position for row in rows], numpy.int64)
        places = positions if self.place is None else self._places(positions.tolist())
        return _Selected(rows, places, Labels([own.id for _, _, own in selected], positions, kept), inputs)

    def _places(self, positions: list[int]) -> NDArray[numpy.int64]:
        assert self.place is not None, "asked for by the caller"
        return numpy.array(list(map(self.place, positions)), numpy.int64)

    def _prepared_column(self, inputs: Column) -> PreparedColumn:
        """The inputs as the engine's column, or as one of what its `prepare` gives."""
        if self.preparer is not None and not self.in_time.limits:
            found = attempted(self.preparer.prepare_column, inputs)
            if isinstance(found, JobError):
                raise found
            if isinstance(found, PreparedColumn) and len(found.payloads) == len(found.costs) == len(inputs):
                return found
        values = values_of(inputs)
        answers = self.in_time.prepare(self.engine, values)
        if self.dedupe is None and any(isinstance(answer, Prepared) and answer.greedy for answer in answers):
            self.needs_keys.set()
        return listed(answers, values)

    def _cut(self, selected: _Selected, prepared: PreparedColumn, done: PreparedChunk) -> None:
        done.truncated += prepared.truncated
        for row, error in prepared.errors.items():
            record = selected.records[row]
            done.refuse(record, self.columns.id_of(record), error, 1)
        if profile_of(self.engine).counts_tokens:
            done.tokens += int(prepared.costs.sum())
        places = selected.places
        edges = (numpy.flatnonzero(numpy.diff(places) != 1) + 1).tolist()
        identify = self.columns.identify
        if not edges:
            done.blocks.append(Block(int(places[0]), selected.records, identify, selected.labels, prepared))
            return
        for start, stop in zip([0, *edges], [*edges, len(places)], strict=True):
            part = slice(start, stop)
            errors = {row - start: error for row, error in prepared.errors.items() if start <= row < stop}
            own = PreparedColumn(prepared.payloads.take(numpy.arange(start, stop)), prepared.costs[part], errors)
            labels = selected.labels.taken(part)
            done.blocks.append(Block(int(places[start]), selected.records[part], identify, labels, own))

    # -- records -----------------------------------------------------------------------------------------------------

    def _select(
        self, rows: Sequence[Record], attempts: Mapping[int, int], done: PreparedChunk
    ) -> tuple[list[tuple[Record, Record, Record]], list[object]]:
        """Each record as read, after user code and as kept for the output; and the inputs for the engine."""
        selected: list[tuple[Record, Record, Record]] = []
        inputs: list[object] = []
        identify, input_of, choice = self.columns.identify, self.columns.input_of, self.columns.choice
        sees = self.user.prepares or self.user.finishes
        for row, mapped in self.user.prepared(rows) if sees else zip(rows, rows, strict=True):
            if isinstance(mapped, Exception):
                done.refuse(row, self._id_of(row), mapped, attempts.get(row.position, 1))
                continue
            kept = row
            try:
                kept = identify(mapped)
                if choice is not None and not _takes(choice, row):
                    done.answered.append((Work(kept, row.data), StepAnswer(getattr(row.data, "answer", None))))
                    continue
                value = input_of(mapped)
            except StoppedEarly:
                raise
            except BaseException as error:  # noqa: BLE001 - a row may be a mapping of the user's own, with any content
                words = f"the row raised {type(error).__name__} when it was read"
                own = error if isinstance(error, Exception) else RecordError(words)
                done.refuse(row, self._id_of(mapped), own, attempts.get(row.position, 1))
            else:
                selected.append((row, mapped, kept))
                inputs.append(value)
        return selected, inputs

    def _id_of(self, row: Record) -> object:
        """The id of a row that cannot be prepared, if the row has the column."""
        found = attempted(self.columns.id_of, row)
        return row.id if isinstance(found, BaseException) else found
