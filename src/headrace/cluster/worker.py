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
from headrace.app.jobs.budgets import BudgetListener, follow
from headrace.app.jobs.prefix_caching import PrefixCacheListener, prefix_cache_listener
from headrace.app.jobs.running import PreparedInputs, RunningModel
from headrace.app.jobs.tuning import exact, in_dtype, is_settled, try_on
from headrace.batching.foreign_calls import Raised, attempt, attempt_async
from headrace.cluster.worker_pool import WorkUnitReply
from headrace.engines.base import Engine, Prepared
from headrace.engines.capabilities import TUNING
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.engines.profile import EngineProfile
from headrace.errors import BadResultError, ConfigError, EngineError, HeadraceError, RecordError, text_of
from headrace.events import BatchDone, BatchFormed, BatchSplit, Event, StageDone, StepDone
from headrace.jobs.pipeline.prepare_calls import prepare_all
from headrace.observe.accounting.timeline import BusyTime
from headrace.processes import portable
from headrace.processes.portable import Portable


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

    @property
    def to_load(self) -> EngineConfig:
        """The engine that a worker loads first."""
        return exact(self.config) if self.tries else self.config

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
        """The engine's dtype; empty if it does not say."""
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
        model = self._model
        tunable = TUNING.of(model.engine)
        if tunable is None:
            return self._info()
        inputs = await asyncio.to_thread(self._prepare, sample.payloads)
        self._events.clear()  # these records come again
        tuned = await asyncio.to_thread(try_on, tunable, self._spec.config, inputs.work, sample.records, model.profile)
        if tuned.precision is not None:
            self._tell(tuned.precision)
        self._spec = self._spec.chosen(str(tuned.engine.describe().get("dtype", "")))
        if tuned.engine is model.engine:
            return self._info()
        await model.batcher.stop()
        return await self._begin(tuned.engine)

    async def _use(self, spec: WorkerSpec) -> WorkerInfo:
        self._spec = spec
        await self._model.batcher.stop()
        await asyncio.to_thread(self._model.engine.close)
        return await self._load()

    async def _load(self) -> WorkerInfo:
        if self._spec.version != headrace.__version__:
            raise ConfigError(
                f"{await self.hello()} has Headrace {headrace.__version__}, this job {self._spec.version}; "
                "install the same version on both sides"
            )
        return await self._begin(await asyncio.to_thread(load_engine, self._spec.to_load))

    async def _begin(self, engine: Engine) -> WorkerInfo:
        """Make the batcher of an engine, whose budget follows the device as in a job."""
        model = self._model = RunningModel(self._spec.to_load, engine, self._on_event)
        await model.batcher.start()
        self._budget = follow(model.config, engine, model.batcher, self._tell)
        self._prefix_cache = prefix_cache_listener(engine, self._on_event)
        return self._info()

    def _info(self) -> WorkerInfo:
        engine, profile = self._model.engine, self._model.profile
        tunable = TUNING.of(engine)
        greedy = profile.caches_prefixes and getattr(prepare_all(engine, ["a prompt"])[0], "greedy", False)
        can_try = self._spec.tries and tunable is not None and not is_settled(tunable, self._spec.config)
        return WorkerInfo(dict(engine.describe()), profile, greedy, can_try)

    async def work(self, payloads: list[bytes]) -> bytes:
        """The pickled `WorkUnitReply` to a work unit."""
        inputs = await asyncio.to_thread(self._prepare, payloads)
        costs = [entry.cost if isinstance(entry, Prepared) else 0 for entry in inputs.entries]
        return self._reply(await self._model.outputs(inputs), costs)

    def _prepare(self, payloads: Sequence[bytes]) -> PreparedInputs:
        started = time.monotonic()
        inputs = self._model.prepare([_unpickled(payload) for payload in payloads])
        ended = time.monotonic()
        good = [entry for entry in inputs.entries if isinstance(entry, Prepared)]
        self._events.append(
            StageDone(
                "prepare", 0, ended - started, ended,
                tokens=sum(entry.cost for entry in good) if self._model.profile.counts_tokens else 0,
                truncated=sum(entry.truncated for entry in good),
                split=sum(entry.parts > 0 for entry in good), chunks=sum(entry.parts for entry in good),
            )
        )  # fmt: skip
        return inputs

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
        if self._budget is not None:
            self._budget(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._events.append(event)


def _unpickled(payload: bytes) -> object:
    """The record, or its error: its class may be missing here."""
    record = attempt(pickle.loads, payload)
    if not isinstance(record, Raised):
        return record
    return RecordError(f"the record cannot be unpickled on the worker: {text_of(record.cause)}")


def loaded(answer: WorkerInfo | Portable) -> WorkerInfo:
    """The answer of `WorkerActor.load`. Raises HeadraceError: the model cannot be loaded."""
    if isinstance(answer, WorkerInfo):
        return answer
    error = answer.unpacked()
    raise error if isinstance(error, HeadraceError) else EngineError(f"{answer.kind}: {answer.text}") from error


def unpack(reply: bytes) -> WorkUnitReply:
    """Unpickle a reply. Raises Exception: a class of its outputs is missing here."""
    received: WorkUnitReply
    received, results = pickle.loads(reply)
    return replace(received, results=portable.unpack(results))
