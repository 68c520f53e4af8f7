"""A job as it is handed to its run: the parts, built and checked, and how far they may go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from headrace.engines.base import AnyEngine
from headrace.errors import TooManyErrorsError
from headrace.events import Listener
from headrace.io.base import Chunk, Source
from headrace.jobs.pipeline.columns import Columns
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import PreparedChunk
from headrace.jobs.state.in_flight import InFlight
from headrace.jobs.state.output import JobOutput, StartMode
from headrace.records import Failed

JUDGED_SHARE = 0.1
"""The error rate is judged once so much of the input has been read: its beginning may be worse than the rest."""
JUDGED_AFTER = (1_000, 100_000)
"""At the earliest and at the latest after so many records."""
JUDGED_AFTER_UNKNOWN = 10_000
"""The same where nothing tells how long the input is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a job goes. None of these decides what the output is."""

    max_error_rate: float = 0.5
    """Stop when more than this fraction of the records has failed; judged after a tenth of the input and at its end."""
    max_errors: int | None = None
    """Stop when more than so many records have failed, in all runs; None for no such limit."""
    max_attempts: int = 4
    """Times a record is tried whose failure may pass."""
    retry_wait_s: float = 0.5
    """Before the second attempt at most so many seconds, before each later one at most twice as many."""
    workers: int | None = None
    """Chunks that are prepared at once; None for as many as it takes, up to the cores there are."""
    buffer_memory: int = 512_000_000
    """Bytes of rows and outputs that may be in memory at once, from reading to writing; reading waits at the bound."""
    part_records: int = 4096
    """Rows after which a part is committed."""
    commit_interval_s: float = 2.0
    """Seconds after which a finished row is committed though its part is small: what a kill may cost."""


class StopRequest:
    """Asks a running job to stop. A plain flag: it may be set from a signal handler or from any thread."""

    grace_s: float = 0.0
    """For so long batches of records already read are begun: what has finished lies scattered among what waits, and
    each gap makes one more part."""

    def __init__(self) -> None:
        self.requested = False
        self.working = False
        """Whether a job has begun that would finish what is in flight; before, there is nothing to wait for."""
        self._asked_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no more batches are to be begun."""
        return self.requested and time.monotonic() >= self._asked_at + self.grace_s

    def judge(self, waiting: int, per_second: float) -> None:
        """Begin no more batches if so many records cannot be done in the grace: it would be spent for nothing."""
        if waiting > per_second * self.grace_s:
            self.grace_s = 0.0

    def request(self) -> None:
        """Read no more, finish what is in flight, commit, return."""
        self._asked_at = time.monotonic()
        self.requested = True


class BatcherPort(Protocol):
    """What a job needs of a batcher."""

    async def __aenter__(self) -> Self:
        """Begin to form batches."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object:
        """End."""
        ...

    def runs_as_completed(
        self, runs: AsyncIterable[Sequence[Any]]
    ) -> AsyncGenerator[tuple[Sequence[Any], Sequence[Any], bool], None]:
        """Records that come in runs of equal cost: as they complete, some of them, their results, and whether one of
        these may be an exception. In bounded memory.
        """
        ...


class IdCheck(Protocol):
    """Reads the input so that ids of prepared records can be checked. See `headrace.jobs.pipeline.mapped_ids`."""

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """What is to be prepared."""
        ...

    def check(self, prepared: PreparedChunk) -> list[int]:
        """Check what was; returns the positions that are not to be done again and were left out."""
        ...

    def finish(self) -> None:
        """Check the last ones."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a run needs."""

    source: Source
    columns: Columns
    engine: AnyEngine
    batcher: BatcherPort
    output: JobOutput
    start: StartMode
    listener: Listener
    limits: Limits
    stop: StopRequest
    user: UserCode
    ids: IdCheck | None = None
    """Looks at ids that user code makes; None where the source does, or positions are ids."""
    engine_timeout_s: float | None = None
    """What the batcher allows the engine for a batch, a step or a request."""
    dedupe: bool = False
    """Compute equal inputs once."""
    retry: bool = False
    """Do again what failed in the finished job, and nothing else."""
    in_flight: InFlight | None = None
    """Where the batch in the engine is noted; None where a crash of the engine does not end this process."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a run ended, if it did not raise."""

    state: Literal["finished", "interrupted", "already_finished"]
    records: int
    """Records of the input that are done, those of earlier runs included."""
    failed: int
    """How many of them are dead letters."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long an input is, as far as its source knows."""

    records: int | None = None
    bytes: int | None = None


class Tally:
    """Counts how records end, and raises when too many fail. Starts with what earlier runs have committed.

    The rate is that of failures among the records that are known of. Those that have ended would be the wrong measure:
    a record that cannot be read fails at once, while its good neighbours are still on their way. It is judged once a
    tenth of the input is known (1,000 records at least, 100,000 at most), or as soon as the rest cannot mend it.
    """

    def __init__(self, records: int, failed: int, limits: Limits, length: Length | None = None) -> None:
        self.records = records
        """Records that have ended."""
        self.failed = failed
        self._known = records
        self._limits = limits
        self._length = length or Length()
        self._read_bytes = 0
        self._reasons: Counter[str] = Counter()
        self._example = ""

    def expect(self, records: int, size: int = 0) -> None:
        """So many more are on their way, read from so many bytes of the input."""
        self._known += records
        self._read_bytes += size

    def count(self, ended: int, failures: Sequence[Failed]) -> None:
        """Count the end of some, and those of them that failed.

        Raises:
            TooManyErrorsError: more than the allowed number has failed, or more than the allowed fraction.
        """
        self.records += ended
        if not failures:
            return
        self.failed += len(failures)
        for failed in failures:
            self._reasons[failed.reason] += 1
        self._example = f"record {failures[-1].record.position}: {failures[-1].message}"
        most = self._limits.max_errors
        if most is not None and self.failed > most:
            raise TooManyErrorsError(
                f"{self.failed} records failed, more than --max-errors {most} allows{self._kinds()}"
            )
        total = self._whole()
        if self._known >= self._judged_from() or (total and self.failed > self._limits.max_error_rate * total):
            self.check()

    def _whole(self) -> int | None:
        """Records of the whole input, where that is certain."""
        if self._length.bytes and self._read_bytes >= self._length.bytes:
            return self._known
        return self._length.records

    def _judged_from(self) -> float:
        """How many records must be known of before their rate means anything."""
        total: float | None = self._whole()
        if total is None and self._length.bytes and self._read_bytes:
            total = self._known * self._length.bytes / self._read_bytes
        if total is None:
            return JUDGED_AFTER_UNKNOWN
        least, most = JUDGED_AFTER
        return min(max(least, JUDGED_SHARE * total), most)

    def check(self) -> None:
        """Judge what has been counted, however few.

        Raises:
            TooManyErrorsError: more than the allowed fraction has failed.
        """
        limit = self._limits.max_error_rate
        if self.failed > limit * self._known:
            raise TooManyErrorsError(
                f"{self.failed} of {self._known} records failed, more than --max-error-rate {limit:g} allows"
                f"{self._kinds()}; what is finished is kept: mend the cause, or run again with a higher rate"
            )

    def _kinds(self) -> str:
        kinds = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common(3))
        return f" (in this run: {kinds}; the last, {self._example})" if kinds else ""
