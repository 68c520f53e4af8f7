"""The second stage: pick the id and the input of each row, and prepare the inputs for the engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from headrace.columns import Column, PreparedColumn, values_of
from headrace.engines.base import Engine, Placed, Prepared
from headrace.engines.capabilities import ColumnPreparer
from headrace.engines.profile import profile_of
from headrace.engines.requests.formed import FormedRequest, Try
from headrace.errors import JobError, RecordError, StoppedEarly, attempted
from headrace.events import StageDone
from headrace.extras import lazy
from headrace.io.base import Chunk
from headrace.jobs.answer_form import AnswerForm
from headrace.jobs.pipeline import arrow
from headrace.jobs.pipeline.blocks import Block, Labels
from headrace.jobs.pipeline.candidates import QueryDocuments, prepare_candidates
from headrace.jobs.pipeline.dedupe import RepeatCounter, key_of
from headrace.jobs.pipeline.inputs import Columns, TableColumns, is_empty, table_columns
from headrace.jobs.pipeline.memory_budget import value_bytes
from headrace.jobs.pipeline.prepare_calls import InTime, listed
from headrace.jobs.pipeline.samples import Samples
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.waiting_retries import Retry
from headrace.jobs.pipeline.work import PreparedChunk, StepAnswer, Work, unreadable
from headrace.records import Failed, Record

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
else:
    numpy = lazy("numpy")


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
        done = PreparedChunk(answered=[unreadable(failed, has_ids=self.columns.id is not None) for failed in failures])
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
        used = ended - started if self.user.prepares_in_processes else time.thread_time() - cpu
        return StageDone(
            "prepare", rows, ended - started, ended, tokens=done.tokens, truncated=done.truncated,
            cpu_s=used, compared=compared, repeated=repeated,
            split=done.split, chunks=done.chunks, empty=empty,
        )  # fmt: skip

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _prepare_blocks(self, chunk: Chunk) -> tuple[PreparedChunk, StageDone]:
        since = time.monotonic(), time.thread_time()
        done = PreparedChunk(
            answered=[unreadable(failed, has_ids=self.columns.id is not None) for failed in chunk.failures]
        )
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
        identify, input_of, takes = self.columns.identify, self.columns.input_of, self.columns.takes
        sees = self.user.prepares or self.user.finishes
        for row, mapped in self.user.prepared(rows) if sees else zip(rows, rows, strict=True):
            if isinstance(mapped, Exception):
                done.refuse(row, self._id_of(row), mapped, attempts.get(row.position, 1))
                continue
            kept = row
            try:
                kept = identify(mapped)
                if not takes(row):
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
        """The id of a row that cannot be prepared; None if it cannot be read: its place may be the id of another."""
        found = attempted(self.columns.id_of, row)
        return None if isinstance(found, BaseException) else found
