"""Frozen events passed to listeners; metrics are computed from these.

Durations are in seconds of the monotonic clock. `at` is when the event occurred, on `time.monotonic()`'s scale (a
batcher uses its event loop's clock, which is virtual in tests).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.records import LeftOut

CloseReason: TypeAlias = Literal["full_cost", "full_size", "timeout", "idle", "drain", "boundary"]
"""Why a batch was closed:

full_cost  the next record would exceed the cost budget
full_size  max_batch_size records
timeout    batch_timeout_s since the oldest waiting record arrived
idle       waiting longer cannot add records: batch_timeout_s is 0, or the queue is full
drain      no more records are coming: the batcher stops, or a mapped input has ended
boundary   length bucketing: the next record in the window differs too much in length
"""

HostStage: TypeAlias = Literal["load", "prepare", "finish", "write"]


@dataclass(frozen=True, slots=True)
class BatchFormed:
    """A batch was formed for a free slot."""

    batch: int
    """0-based number of the batch in its batcher."""
    size: int
    cost: float
    """Sum of the records' costs."""
    padded_cost: float
    """Cost including padding: records × the longest if the engine pads, else `cost`."""
    reason: CloseReason
    starved_s: float
    """How long the slot was free before this batch."""
    at: float
    company_s: float = 0.0
    """How much of that the batcher held records back, to let more join them."""
    waited_s: float = 0.0
    """How long the oldest record of the batch waited."""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch returned from `process_fn`, successfully or not."""

    batch: int
    size: int
    failed: int
    cost: float
    padded_cost: float
    duration_s: float
    """Without the time in which it waited for the batch before it, with `overlap`."""
    at: float
    stopped: int = 0
    """How many of the failed records have no result because the call was cancelled, or returned them unprocessed, each
    with a `StoppedError`."""
    handed_s: float = 0.0
    """How much of the duration passed between the batcher and `process_fn`'s thread, in which neither the engine nor
    the batcher waits for anything but Python's lock or a core."""

    @property
    def computed_s(self) -> float:
        """How long `process_fn` ran."""
        return max(self.duration_s - self.handed_s, 0.0)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A failed batch was run again in halves."""

    batch: int
    size: int
    cause: BaseException
    out_of_memory: bool
    at: float
    duration_s: float = 0.0
    """How long the call that failed took; its records run again."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step-wise engine took one step, successfully or not."""

    step: int
    """0-based number of the step in its batcher."""
    size: int
    """Records in the engine during the step."""
    joined: int
    """How many of them joined for this step."""
    finished: int
    failed: int
    """Records that left with a result or an exception after it, and how many of those with an exception."""
    sent_back: int
    """Records evicted because they no longer fit; they resume or restart later."""
    cost: float
    """Total final cost of the records that left with a result."""
    duration_s: float
    starved_s: float
    """How long the engine was idle before this step."""
    at: float
    handed_s: float = 0.0
    """How much of the duration passed between the batcher and the engine's thread, as in `BatchDone`."""

    @property
    def computed_s(self) -> float:
        """How long the engine worked."""
        return max(self.duration_s - self.handed_s, 0.0)


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """One record of a job failed permanently."""

    position: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class InputLeftOut:
    """The input of a job contains something that is not read."""

    left_out: LeftOut
    at: float


@dataclass(frozen=True, slots=True)
class StageDone:
    """A host-side stage of a job finished a chunk of records. Stages overlap, so times exceed wall time."""

    stage: HostStage
    records: int
    duration_s: float
    at: float
    bytes: int = 0
    """Bytes of input read (load) or of output written (write)."""
    tokens: int = 0
    """Model tokens of the records (prepare)."""
    truncated: int = 0
    split: int = 0
    chunks: int = 0
    """Records that were cut to the model's maximum length, that were split, and the chunks of these (prepare)."""
    nulled: int = 0
    """NaN and infinities written as null (write)."""
    empty: int = 0
    """Inputs that are an empty text (prepare)."""
    cpu_s: float | None = None
    """Seconds of a core that the thread has used, or waited for the user's function in a process (prepare)."""
    compared: int = 0
    repeated: int = 0
    """The first records, which are compared with those before; how many are equal to an earlier one (prepare)."""


@dataclass(frozen=True, slots=True)
class PipelineWaited:
    """A job could not go on, although its stages were ready."""

    on: Literal["sink", "memory", "retry"]
    """What it waited for: finished records that wait for the disk, room in memory although the disk is not at work, or
    records whose next try is not due yet."""
    duration_s: float
    at: float


@dataclass(frozen=True, slots=True)
class RunDescribed:
    """A job is about to start: what it is. The first event that a listener of `headrace.run` hears."""

    name: str
    settings: Mapping[str, str]
    """The output, and the settings without secrets."""
    versions: Mapping[str, str]
    at: float
    """When the run began, before its model was loaded."""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A job has started, and the size of its input is known."""

    total_bytes: int | None
    """Size of the input; None if unknown."""
    total_records: int | None
    records_done: int
    """Records in committed parts, which this run skips."""
    at: float
    failed_done: int = 0
    """How many of them failed."""
    retry: bool = False
    """Whether all records of this run have failed before."""


@dataclass(frozen=True, slots=True)
class PartCommitted:
    """A part of the output is durable; its records are done."""

    start: int
    end: int
    """The part's first position, and one past its last."""
    failed: int
    """How many of them are dead letters."""
    bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class PartDamaged:
    """A part committed by an earlier run was changed; it is removed, and its records are processed again."""

    path: str
    records: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class OrderChosen:
    """The order of some records of a job was chosen."""

    order: Literal["sorted", "prefix", "input"]
    """By prompt, sorted on disk; by prompt, one window of the input after the other; or that of the input."""
    records: int
    reason: str
    """Why, for a person."""
    at: float


@dataclass(frozen=True, slots=True)
class DuplicatesFound:
    """Records got the answer of an equal one."""

    records: int
    at: float


@dataclass(frozen=True, slots=True)
class PrecisionChosen:
    """The model's dtype was chosen."""

    dtype: str
    """Such as `bfloat16`."""
    detail: str
    """Why: the speed and deviation measured, and on how many records; or why no other was tried."""
    duration_s: float
    """Time taken to choose it."""
    at: float
    speed: float = 1.0
    """How many times as fast as in float32 the device computes a product in it."""


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The budget changed: batches of another size are faster, or larger ones do not fit."""

    budget: float
    """What a batch may cost now, in the engine's unit."""
    at: float


@dataclass(frozen=True, slots=True)
class StepSizeChanged:
    """Steps of a language model have another size, which is faster."""

    answers: int
    """Answers that a step may continue now."""
    tokens: int
    """Tokens that a step may have now, those of prompts included."""
    at: float


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """The peak memory of the process, or of its GPU, while a job's batches ran."""

    peak: int
    limit: int
    """In bytes."""
    source: str
    """What sets the limit."""
    at: float
    larger_pay: bool | None = None
    """Whether batches larger than the largest budget allowed would be faster; None if unknown."""


@dataclass(frozen=True, slots=True)
class DeviceUsed:
    """What the device of a job did while its batches ran."""

    computed_s: float
    """How long the forward passes alone took; on CUDA, by the device's own clock."""
    operations: float
    """Floating-point operations that the real tokens needed; 0 if unknown."""
    weight_bytes: float
    """Weights that the passes read, together."""
    peak_operations: float
    peak_bytes: float
    """Per second, of a large matrix product in this dtype, and read from memory; 0 if not measured."""
    dtype: str
    at: float
    energy_j: float | None = None
    """The energy that the GPU used, as NVML reports it; None if unknown."""
    clock_mhz: float | None = None
    """The clock rate of the GPU's processors at the end; None if unknown."""
    power_limit_w: float | None = None
    """The power that the GPU may take; None if unknown."""
    kernels: float | None = None
    """Fraction of the time in which any kernel ran, by the GPU's counters; None if unknown."""
    tensor_cores: float | None = None
    """Fraction of the time in which the tensor cores computed; None if unknown."""
    memory_bus: float | None = None
    """Fraction of the bandwidth of the GPU's memory; None if unknown."""
    replayed: float = 0.0
    """Share of the passes that were replays of captured work (CUDA graphs)."""
    no_graphs: str = ""
    """Why there were no replays, or no more; empty if nothing was in the way."""


@dataclass(frozen=True, slots=True)
class PrefixCacheUsed:
    """How many prompt tokens a language model has read since the last such event, and how many from its cache."""

    queries: int
    hits: int
    computed: int
    """Tokens of prompts; those found in the cache; those that the model computed."""
    at: float
    generated: int = 0
    """Tokens of answers."""
    computed_s: float | None = None
    """What computing the prompts' tokens took; None if unknown."""


@dataclass(frozen=True, slots=True)
class EndpointUsed:
    """What became of the requests that a job sent to servers."""

    sent: int
    limited: int
    """Those that a server refused because there were too many (429); they were sent again."""
    unanswered: int
    """Those that no server answered."""
    at_once: int
    """Requests in flight at most."""
    at: float
    held: int = 0
    """Requests that waited here for a limit of the rate, which was given or which the server told."""


@dataclass(frozen=True, slots=True)
class PromptsCompared:
    """What the first prompts of a language model's job have in common. Equal prompts count once."""

    shared: float
    better: float
    """The fraction of their text in beginnings that prompts share as neighbours: now, and with `template`."""
    template: str | None  # with the fields in a better order; None if the present one is as good
    at: float


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job ended. A later run of the same command finds this `state`."""

    state: Literal["finished", "interrupted", "failed"]
    at: float


@dataclass(frozen=True, slots=True)
class WorkUnitDone:
    """A cluster worker returned a unit of records. Its batches have their own events."""

    worker: str
    records: int
    failed: int
    batches: int
    busy_s: float  # in which its engine was busy, since its last unit
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died; other workers take its records."""

    worker: str
    records: int
    """Records it was working on."""
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RequestDone:
    """An HTTP request was answered, or its client disconnected."""

    route: str
    """The route, such as `/v1/embeddings`; "other" for unknown routes."""
    method: str
    status: int
    """Status of the response; 499 if the client disconnected."""
    duration_s: float
    at: float
    model: str = ""
    """The server's model; of several, the one that answered, or "" if none did."""
    waited_s: float = 0.0
    """The part of `duration_s` for which it waited until its model was loaded, at a server of several."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """A server has loaded a model."""

    model: str
    duration_s: float
    """Time to load, tune and warm up."""
    at: float


@dataclass(frozen=True, slots=True)
class StreamChunkSent:
    """A chunk of a streamed response, usually a token, was sent to its client."""

    first: bool
    """Whether it is the response's first chunk."""
    wait_s: float
    """Seconds since the request was read for the first chunk, since the previous chunk for others."""
    at: float


Event: TypeAlias = (
    BatchFormed | BatchDone | BatchSplit | StepDone | RecordFailed | InputLeftOut | StageDone | PipelineWaited |
    RunDescribed | JobStarted | PartCommitted | PartDamaged | OrderChosen | DuplicatesFound | PrecisionChosen |
    BudgetChanged | StepSizeChanged | MemoryUsed | DeviceUsed | PrefixCacheUsed | EndpointUsed | PromptsCompared |
    JobDone | WorkUnitDone | WorkerLost | RequestDone | ModelLoaded | StreamChunkSent
)  # fmt: skip
Listener: TypeAlias = Callable[[Event], None]
