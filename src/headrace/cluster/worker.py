"""A worker process: one engine and one batcher that process work units. Independent of the cluster software."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace

import headrace
from headrace.app.jobs import job as jobs
from headrace.app.jobs.budgets import BudgetListener, follow
from headrace.app.jobs.prefix_caching import PrefixCacheListener, prefix_cache_listener
from headrace.app.jobs.tuning import exact, in_dtype, is_settled, try_on
from headrace.batching.batcher import Batcher
from headrace.batching.tasks import Raised, attempt, attempt_async
from headrace.cluster.worker_pool import WorkUnitReply
from headrace.engines.base import Engine
from headrace.engines.capabilities import TUNING
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import BadResultError, ConfigError, EngineError, HeadraceError, RecordError, text_of
from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, StageDone, StepDone
from headrace.jobs.pipeline.chunks import answers
from headrace.jobs.pipeline.infer import stream_in_order, stream_longest_first
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.prepare import prepare_all
from headrace.jobs.pipeline.work import Work
from headrace.jobs.settings import JobSettings, Limits
from headrace.observe.accounting.batches import BusyTime
from headrace.processes import portable
from headrace.processes.portable import Portable
from headrace.records import Record


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker loads."""

    config: EngineConfig
    version: str
    """Headrace version of the job."""
    tries: bool = False
    """Whether one worker will `choose` the dtype, and the others `use` it. Until then it is the engine's own."""

    def check_sendable(self, dumps: Callable[[object], bytes] = pickle.dumps) -> None:
        """Raise ConfigError if an option cannot be pickled for a worker."""
        try:
            dumps(self)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(f"the engine's options cannot be sent to a worker: {error}") from error

    def settings(self) -> JobSettings:
        """The settings of an equivalent local job."""
        limits = Limits(max_attempts=1)  # the job retries; a worker reports the error of each record
        config = exact(self.config) if self.tries else self.config
        return JobSettings(source=None, sink="", config=config, limits=limits)

    def chosen(self, dtype: str) -> WorkerSpec:
        """The same in this dtype."""
        return replace(self, config=in_dtype(self.config, dtype), tries=False)


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Records to choose the dtype by."""

    payloads: Sequence[bytes]
    records: int | None
    """Those that each worker will compute; None if unknown."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports after loading its model."""

    engine: Mapping[str, object]
    """Result of `Engine.describe`."""
    profile: EngineProfile
    """Profile of the engine, with the job's budget and batch size."""
    greedy: bool = False
    """Whether a plain prompt is answered without sampling."""
    can_try: bool = False
    """Whether another dtype may be faster."""

    @property
    def dtype(self) -> str:
        """Of the engine; empty if it does not say."""
        return str(self.engine.get("dtype", ""))


class WorkerActor:
    """Loads a model and processes work units. Concurrent units share one batcher."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._events: list[Event] = []
        self._busy = BusyTime()
        self._reported_busy_s = 0.0
        self._batches = 0
        self._prefix_cache: PrefixCacheListener | None = None
        self._budget: BudgetListener | None = None
        self._loading = asyncio.Lock()

    async def hello(self) -> str:
        """Host and process of the worker."""
        return f"{socket.gethostname()}, process {os.getpid()}"

    async def clock(self) -> float:
        """`time.monotonic()` here."""
        return time.monotonic()

    async def load(self) -> WorkerInfo | Portable:
        """Load the model; returns the error if that fails."""
        return await self._answered(self._load())

    async def choose(self, sample: WorkerSample) -> WorkerInfo | Portable:
        """Take the fastest dtype whose outputs for the sample are as good as float32's; as `load`."""
        return await self._answered(self._choose(sample))

    async def use(self, spec: WorkerSpec) -> WorkerInfo | Portable:
        """Be as another worker has chosen; as `load`."""
        return await self._answered(self._use(spec))

    async def _answered(self, loading: Coroutine[object, object, WorkerInfo]) -> WorkerInfo | Portable:
        async def alone() -> WorkerInfo:
            async with self._loading:
                return await loading

        info = await attempt_async(alone())
        return Portable.of(info.cause) if isinstance(info, Raised) else info

    async def _choose(self, sample: WorkerSample) -> WorkerInfo:
        settings, tunable = self._spec.settings(), TUNING.of(self._engine)
        if tunable is None:
            return self._info(settings)
        none: list[object] = [None] * len(sample.payloads)
        work = await asyncio.to_thread(self._prepare, sample.payloads, none, [0] * len(none))
        self._events.clear()  # these records come again
        profile = jobs.tuned_profile(settings, tunable)
        tuned = await asyncio.to_thread(try_on, tunable, self._spec.config, work, sample.records, profile)
        if tuned.precision is not None:
            self._tell(tuned.precision)
        self._spec = self._spec.chosen(str(tuned.engine.describe().get("dtype", "")))
        if tuned.engine is self._engine:
            return self._info(settings)
        await self._batcher.stop()
        return await self._begin(tuned.engine)

    async def _use(self, spec: WorkerSpec) -> WorkerInfo:
        self._spec = spec
        await self._batcher.stop()
        await asyncio.to_thread(self._engine.close)
        return await self._load()

    async def _load(self) -> WorkerInfo:
        if self._spec.version != headrace.__version__:
            raise ConfigError(
                f"{await self.hello()} has Headrace {headrace.__version__}, this job {self._spec.version}; "
                "install the same version on both sides"
            )
        return await self._begin(await asyncio.to_thread(load_engine, self._spec.settings().config))

    async def _begin(self, engine: Engine) -> WorkerInfo:
        """Make the batcher of an engine, whose budget follows the device as in a job."""
        settings, self._engine = self._spec.settings(), engine
        self._batcher: Batcher[Work, object] = jobs.build_batcher(settings, engine, StopRequest(), self._on_event)
        await self._batcher.start()
        self._budget = follow(settings.config, engine, self._batcher, self._tell)
        self._prefix_cache = prefix_cache_listener(engine, self._on_event)
        return self._info(settings)

    def _info(self, settings: JobSettings) -> WorkerInfo:
        profile, tunable = jobs.tuned_profile(settings, self._engine), TUNING.of(self._engine)
        greedy = profile.caches_prefixes and getattr(prepare_all(self._engine, ["a prompt"])[0], "greedy", False)
        can_try = self._spec.tries and tunable is not None and not is_settled(tunable, self._spec.config)
        return WorkerInfo(dict(self._engine.describe()), profile, greedy, can_try)

    async def work(self, payloads: list[bytes]) -> bytes:
        """The pickled `WorkUnitReply` to a work unit."""
        results: list[object] = [None] * len(payloads)
        costs = [0] * len(payloads)
        work = await asyncio.to_thread(self._prepare, payloads, results, costs)
        stream = stream_in_order if profile_of(self._engine).caches_prefixes else stream_longest_first
        async for run, outputs, _ in answers(self._batcher, stream(work)):
            for item, output in zip(run, outputs, strict=True):
                results[item.record.position] = output
        return self._reply(results, costs)

    def _prepare(self, payloads: Sequence[bytes], results: list[object], costs: list[int]) -> list[Work]:
        started = time.monotonic()
        work: list[Work] = []
        truncated = split = chunks = 0
        inputs: list[object] = []
        indices: list[int] = []
        for index, payload in enumerate(payloads):
            record = attempt(pickle.loads, payload)
            if isinstance(record, Raised):  # its class may be missing here
                results[index] = RecordError(f"the record cannot be unpickled on the worker: {text_of(record.cause)}")
            else:
                inputs.append(record)
                indices.append(index)
        for index, entry in zip(indices, prepare_all(self._engine, inputs), strict=True):
            if isinstance(entry, Exception):
                results[index] = entry
                continue
            costs[index] = entry.cost
            truncated += entry.truncated
            split += entry.parts > 0
            chunks += entry.parts
            work.append(Work(Record(index, None, None), None, entry.payload, entry.cost))
        ended = time.monotonic()
        tokens = sum(costs) if profile_of(self._engine).counts_tokens else 0
        self._events.append(
            StageDone(
                "prepare", 0, ended - started, ended, tokens=tokens, truncated=truncated, split=split, chunks=chunks
            )
        )
        return work

    def _reply(self, results: list[object], costs: list[int]) -> bytes:
        if self._prefix_cache is not None:
            self._prefix_cache.tell()
        if self._budget is not None:
            self._budget.tell()
        events, self._events = self._events, []
        batches, self._batches = self._batches, 0
        busy_s = self._busy.seconds
        reply = WorkUnitReply((), costs, events, batches, busy_s - self._reported_busy_s)
        self._reported_busy_s = busy_s
        return pickle.dumps((reply, portable.pack(results, BadResultError)), protocol=5)

    def _on_event(self, event: Event) -> None:
        match event:
            case BatchDone() | StepDone():
                self._busy.add(event.at, event.computed_s)
            case BatchFormed():
                self._batches += 1
            case BatchSplit():
                event = replace(event, cause=Portable.of(event.cause).unpacked())
            case _:
                pass
        if self._budget is not None:
            self._budget(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._events.append(event)


def loaded(answer: WorkerInfo | Portable) -> WorkerInfo:
    """The answer of `WorkerActor.load`.

    Raises:
        HeadraceError: the model cannot be loaded.
    """
    if isinstance(answer, WorkerInfo):
        return answer
    error = answer.unpacked()
    raise error if isinstance(error, HeadraceError) else EngineError(f"{answer.kind}: {answer.text}") from error


def unpack(reply: bytes) -> WorkUnitReply:
    """Unpickle a reply.

    Raises:
        Exception: a class of its outputs is missing here.
    """
    received: WorkUnitReply
    received, results = pickle.loads(reply)
    return replace(received, results=portable.unpack(results))
