"""What one run of a job works with, and its limits; `app.jobs.job` makes it from settings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Literal, Protocol, Self

from headrace.batching.batcher import Batcher
from headrace.engines.base import Engine
from headrace.engines.profile import profile_of
from headrace.errors import TooManyErrorsError
from headrace.events import Listener
from headrace.io.base import Source
from headrace.jobs.answer_form import AnswerForm
from headrace.jobs.pipeline.inputs import Columns
from headrace.jobs.pipeline.preparers import PreparerPool
from headrace.jobs.pipeline.samples import Samples
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import Work
from headrace.jobs.settings import JobSettings, Limits, Order
from headrace.jobs.state.in_flight import InFlightFile
from headrace.jobs.state.output import JobOutput, StartMode
from headrace.records import Failed

JUDGED_SHARE = 0.1
"""Fraction of the input after which the error rate is checked: the beginning may be worse than the rest."""
JUDGED_AFTER = (1_000, 100_000)
"""Minimum and maximum records before the error rate is checked."""
JUDGED_AFTER_UNKNOWN = 10_000
"""Records before the check if the length of the input is unknown."""


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """The order of work of a job, as far as it is known before its prompts."""

    order: Order
    reason: str = ""
    """Why it is the input's, for a person."""


class StopRequest:
    """Asks a running job to stop. A plain flag: it may be set from a signal handler or from any thread."""

    grace_s: float = 0.0
    """Seconds after a stop request in which batches still start, to close gaps: each gap makes one more part."""

    def __init__(self) -> None:
        self.requested = False
        self.working = False
        """Whether a job is running and would finish its records in flight."""
        self._asked_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no more batches may start."""
        return self.requested and time.monotonic() >= self._asked_at + self.grace_s

    def judge(self, waiting: int, per_second: float) -> None:
        """End the grace period if the waiting records cannot finish in it."""
        if waiting > per_second * self.grace_s:
            self.grace_s = 0.0

    def request(self) -> None:
        """Stop reading, finish records in flight, commit and return."""
        self._asked_at = time.monotonic()
        self.requested = True


class BatcherPort(Protocol):
    """The part of a batcher that a job uses."""

    async def __aenter__(self) -> Self:
        """Start to form batches."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object:
        """Stop forming batches and wait for those that run."""
        ...

    def runs_as_completed(
        self, runs: AsyncIterable[Sequence[Work]]
    ) -> AsyncGenerator[tuple[Sequence[Work], Sequence[object], bool], None]:
        """Process runs of equal cost. Yields completed records, their results, and whether one may be an exception.

        Memory is bounded. An empty run says that no run follows before results do, so no batch need wait for records.
        """
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a run needs."""

    settings: JobSettings
    source: Source
    columns: Columns
    engine: Engine
    batcher: BatcherPort
    output: JobOutput
    start: StartMode
    listener: Listener
    stop: StopRequest
    user: UserCode
    unique_ids: bool = False
    """Whether to check that no id occurs twice."""
    order: OrderPlan | None = None
    """The order of work; None if the engine reads every prompt anew."""
    preparers: PreparerPool | None = None
    """The processes that prepare blocks; None for this one."""
    form: AnswerForm | None = None
    """The form that each answer must have."""
    in_flight: InFlightFile | None = None
    """Records the batch in the engine; None if a crash of the engine does not end this process."""
    run_on: Callable[[Coroutine[object, None, bool]], bool] | None = None
    """Runs the job on the event loop of its batcher, which serves others too and is never stopped by the job; None if
    both are the job's own."""

    def batching(self) -> BatcherPort | nullcontext[BatcherPort]:
        """The batcher, started and stopped with the job if it is the job's own."""
        return self.batcher if self.run_on is None else nullcontext(self.batcher)

    @property
    def is_left(self) -> bool:
        """Whether the job was stopped and does not wait for its records, which are among those of others."""
        return self.run_on is not None and self.stop.is_over

    @property
    def splits(self) -> bool:
        """Whether a record may be several to its engine, whose outputs are joined."""
        parts = self.columns.documents is not None or self.samples is not None
        return profile_of(self.engine).splits or parts

    @property
    def samples(self) -> Samples | None:
        """How many answers each record has; None for one."""
        return Samples.of(self.settings.n, self.settings.best_of, self.form)

    @property
    def in_blocks(self) -> bool:
        """Whether its rows stay together from preparation to commit: where nothing needs each record on its own."""
        profile, settings = profile_of(self.engine), self.settings
        needs_records = self.user.prepares or self.user.finishes or settings.dedupe or self.splits or profile.draws
        needs_records = needs_records or self.form is not None
        return (
            profile.runs_batches
            and not needs_records
            and isinstance(self.batcher, Batcher)
            and find_spec("numpy") is not None
        )


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a run ended, if it did not raise."""

    state: Literal["finished", "interrupted", "already_finished"]
    records: int
    """Finished records, including those of earlier runs."""
    failed: int
    """How many of them are dead letters."""


@dataclass(frozen=True, slots=True)
class Length:
    """Length of an input, if known."""

    records: int | None = None
    bytes: int | None = None


class Tally:
    """Counts how records end, and raises when too many fail. Starts with what earlier runs have committed.

    The error rate is failures per record read, not per record ended: an unreadable record fails at once while its
    neighbours are still in progress. It is checked after a tenth of the input (1,000 to 100,000 records), or once
    the rest of the input cannot bring it below the limit.
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
        """Count records that were read, and their bytes of input."""
        self._known += records
        self._read_bytes += size

    def count(self, ended: int, failures: Sequence[Failed]) -> None:
        """Count records that ended, and the failed ones among them.

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
                f"{self.failed} records failed, more than ``max_errors={most}`` allows{self._kinds()}"
            )
        total = self._whole()
        if self._known >= self._judged_from() or (total and self.failed > self._limits.max_error_rate * total):
            self.check()

    def _whole(self) -> int | None:
        """Records of the whole input; None if unknown."""
        if self._length.bytes and self._read_bytes >= self._length.bytes:
            return self._known
        return self._length.records

    def _judged_from(self) -> float:
        """Records to read before the error rate is checked."""
        total: float | None = self._whole()
        if total is None and self._length.bytes and self._read_bytes:
            total = self._known * self._length.bytes / self._read_bytes
        if total is None:
            return JUDGED_AFTER_UNKNOWN
        least, most = JUDGED_AFTER
        return min(max(least, JUDGED_SHARE * total), most)

    def check(self) -> None:
        """Check the error rate now. Raises TooManyErrorsError: more than the allowed fraction has failed."""
        limit = self._limits.max_error_rate
        if self.failed > limit * self._known:
            raise TooManyErrorsError(
                f"{self.failed} of {self._known} records failed, more than ``max_error_rate={limit:g}`` allows"
                f"{self._kinds()}; finished records are kept. Once the cause is fixed, run again with "
                "``max_error_rate=1``, then `headrace retry`: it runs the failed records again"
            )

    def _kinds(self) -> str:
        most = self._reasons.most_common(3)
        kinds = ", ".join(f"{count} {reason}" for reason, count in most)
        if others := self._reasons.total() - sum(count for _, count in most):
            kinds += f", {others} other"
        return f" (in this run: {kinds}; the last, {self._example})" if kinds else ""
