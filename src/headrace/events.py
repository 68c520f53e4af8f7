"""What can be observed: one frozen event per step, handed to listeners; the logic itself holds no metric.

Durations are in seconds of the monotonic clock. `at` is the moment the step ended, on `time.monotonic()`'s scale
(a batcher's event loop may bring its own clock, as virtual time in tests does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.records import LeftOut

CloseReason: TypeAlias = Literal["full_cost", "full_size", "timeout", "idle", "drain", "boundary"]
"""Why a batch was closed:

full_cost  the next record would exceed the cost budget
full_size  max_batch_size records
timeout    batch_timeout_s since the oldest waiting record arrived
idle       waiting longer could add nothing: batch_timeout_s is 0, or the waiting room is full
drain      no more is coming: the batcher stops, or a mapped input has ended
boundary   length bucketing: the next record in the window is too unlike in length to share padding
"""

Stage: TypeAlias = Literal["load", "prepare", "finish", "write"]


@dataclass(frozen=True, slots=True)
class BatchFormed:
    """A slot was free and a batch was closed for it."""

    batch: int
    """0-based number of the batch in its batcher."""
    size: int
    cost: float
    """Sum of the records' costs."""
    padded_cost: float
    """What the engine computes: records × the longest where it pads, else `cost`."""
    reason: CloseReason
    starved_s: float
    """How long the slot stood free before this batch."""
    at: float


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch came back from `process_fn`, whatever became of it."""

    batch: int
    size: int
    failed: int
    cost: float
    padded_cost: float
    duration_s: float
    at: float
    stopped: int = 0
    """How many of the failed were handed back unprocessed, as a `StoppedError` each."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A failed batch was run again in halves."""

    batch: int
    size: int
    cause: BaseException
    out_of_memory: bool
    at: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step-wise engine took one step, whatever became of it."""

    step: int
    """0-based number of the step in its batcher."""
    size: int
    """Records in the engine during the step."""
    joined: int
    """How many of them had not been in it before this step."""
    finished: int
    """Records that left with a result or an exception after it."""
    failed: int
    """How many of those with an exception."""
    sent_back: int
    """Records that must wait and begin again, because there was less room than hoped."""
    cost: float
    """What the records that left with a result held in the end, together."""
    duration_s: float
    starved_s: float
    """How long the engine had nothing to do before this step."""
    at: float


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """One record of a job failed for good."""

    position: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class InputLeftOut:
    """The input of a job holds something that is not read."""

    left_out: LeftOut
    at: float


@dataclass(frozen=True, slots=True)
class StageDone:
    """A host-side stage of a job finished a chunk of records. Stages overlap: times add up to more than the wall."""

    stage: Stage
    records: int
    duration_s: float
    at: float
    bytes: int = 0
    """Bytes of input read (load) or of output written (write)."""
    tokens: int = 0
    """Model tokens made of the records (prepare)."""
    truncated: int = 0
    """Records cut to the model's maximum length (prepare)."""
    nulled: int = 0
    """NaN and infinities written as null (write)."""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A job knows what it is about to do."""

    total_bytes: int | None
    """Size of the input, None where it cannot be known."""
    total_records: int | None
    records_done: int
    """Records already in committed parts, which this run skips."""
    at: float
    failed_done: int = 0
    """How many of these failed."""


@dataclass(frozen=True, slots=True)
class PartCommitted:
    """A part of the output is durable: its records are done."""

    start: int
    """First position the part holds."""
    end: int
    """One past the last."""
    failed: int
    """How many of them are dead letters."""
    bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class PartDamaged:
    """A part that an earlier run committed is not as it was: it is removed, and its records are done again."""

    path: str
    records: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class NumbersChosen:
    """It is settled which numbers the model computes with."""

    dtype: str
    """Such as `bfloat16`."""
    detail: str
    """Why: how much faster, and how far off, on how many records; or why no others."""
    duration_s: float
    """What finding out took."""
    at: float


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """Batches of another size were measured to be faster, or to be all that fits."""

    budget: float
    """What a batch may cost now, in the engine's unit."""
    at: float


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """A job has ended, and its process held so much memory while its batches ran."""

    peak: int
    """Bytes."""
    limit: int
    """What it may hold."""
    source: str
    """Whose limit that is."""
    at: float


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job ended: `state` is what a later run of the same command finds."""

    state: Literal["finished", "interrupted", "failed"]
    at: float


@dataclass(frozen=True, slots=True)
class WorkUnitDone:
    """A worker on a cluster has returned a piece of a job's records; its batches are told of beside this."""

    worker: str
    records: int
    failed: int
    batches: int
    """Since its last piece, and so is `busy_s`."""
    busy_s: float
    """Seconds in which its engine worked."""
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died, and its records are for others."""

    worker: str
    records: int
    """What it was working on."""
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A request over HTTP was answered, or its client left."""

    route: str
    """As the server's documents name it, such as `/v1/embeddings`; "other" where there is none."""
    method: str
    status: int
    """Of the response; 499 where the client had gone."""
    duration_s: float
    at: float


@dataclass(frozen=True, slots=True)
class WorkUnitSent:
    """A piece of a streamed answer is on its way to its client: a token, as a rule."""

    first: bool
    """Whether it is the answer's first."""
    wait_s: float
    """Since the request was read, for the first; since the piece before, for the others."""
    at: float


Event: TypeAlias = (
    BatchFormed
    | BatchDone
    | BatchSplit
    | StepDone
    | RecordFailed
    | InputLeftOut
    | StageDone
    | JobStarted
    | PartCommitted
    | PartDamaged
    | NumbersChosen
    | BudgetChanged
    | MemoryUsed
    | JobDone
    | WorkUnitDone
    | WorkerLost
    | RequestDone
    | WorkUnitSent
)
Listener: TypeAlias = Callable[[Event], None]
