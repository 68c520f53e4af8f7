"""What a model does at several budgets, in several numbers, on several threads and engines: for `headrace tune`."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace.app.budgets import find_key
from headrace.app.job import Broadcast, build, build_engine, check, shape_of
from headrace.app.plan import Plan
from headrace.device.budget import Measured, knee
from headrace.device.cache import TuningCache, cpu_facts
from headrace.device.memory import PeakMeter
from headrace.device.precision import candidates, compare
from headrace.engines import registry
from headrace.engines.base import BatchEngine, TunableEngine
from headrace.errors import ConfigError, EngineOutOfMemoryError
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.stages import Work
from headrace.jobs.planning.forecast import Shape, pack
from headrace.jobs.planning.survey import survey
from headrace.jobs.settings import JobSettings

_MANY = 32
_FACTORS = (0.5, 1, 2, 4, 8, 16)
"""Of the engine's own budget."""
_COMPARED = 256
"""Records whose outputs are compared with those in float32."""


@dataclass(frozen=True, slots=True)
class GridOptions:
    """What is tried."""

    budgets: tuple[int, ...] = ()
    """Of a batch; empty for some round the engine's own."""
    dtypes: tuple[str, ...] = ()
    """Empty for float32 and what the device computes faster."""
    threads: tuple[int, ...] = ()
    """Of PyTorch; empty for its own."""
    engines: tuple[str, ...] = ()
    """Empty for torch, and onnx where the model's folder has an ONNX file."""
    seconds: float = 60.0
    """Roughly what measuring may take, without loading."""
    latency_target_s: float | None = None
    """Most that a batch may take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run, but for its budget."""

    engine: str
    dtype: str
    threads: int | None
    """None where it is the engine's own affair."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """One point of the curve."""

    setting: Setting
    measured: Measured
    records_per_s: float
    off: str
    """How far its outputs are from those in float32; empty for float32."""
    passes: bool
    """Whether they are good enough."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What was measured, and what is best."""

    rows: tuple[GridRow, ...]
    chosen: GridRow
    one_s: float
    """A batch of one record of middling length, in the chosen setting."""
    many_s: float
    """Of 32 such records."""
    cpu: str


def measure(settings: JobSettings, options: GridOptions, say: Callable[[str], None]) -> Grid:
    """Run a sample of the input at every point. Blocks. What is best is kept for later jobs on this machine.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used, or the model is none that this can be done with.
        JobError: the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    plan = check(settings)
    measuring = _Measuring(plan, options)
    try:
        for name in options.engines or _engines(plan.settings):
            todo = ["as exported"] if name == "onnx" else _ordered(options.dtypes) or ["float32"]
            while todo:
                dtype = todo.pop(0)
                say(f"loading {name} in {dtype} ...")
                faster = measuring.run(name, dtype)
                if not options.dtypes and dtype == "float32":
                    todo += faster
    finally:
        plan.user.close()
    return measuring.result()


class _Measuring:
    """What was measured so far. The first engine is what the others are compared with."""

    def __init__(self, plan: Plan, options: GridOptions) -> None:
        self._plan = plan
        self._options = options
        self._rows: list[GridRow] = []
        self._work: list[Work] = []
        self._reference: list[Any] = []
        self._keys: dict[Setting, dict[str, Any]] = {}
        self._fastest = (0.0, 0.0, 0.0)

    def run(self, name: str, dtype: str) -> list[str]:
        """Load the model so, and measure it; returns the types that its device computes faster."""
        settings = self._plan.settings
        own = {} if name == "onnx" else {"dtype": dtype}
        engine = build_engine(replace(settings, engine=name, engine_options={**settings.engine_options, **own}))
        try:
            if not isinstance(engine, TunableEngine) or not isinstance(engine, BatchEngine):
                raise ConfigError(f"task {settings.task!r} has no batches to tune: its engine batches by itself")
            if not self._work:
                self._work = self._sample(engine)
            quality = _compared(engine, self._work, self._reference)
            key = find_key(engine, settings.task or "")
            for threads in (self._options.threads if name != "onnx" else ()) or (None,):
                setting = Setting(name, dtype, threads)
                self._keys[setting] = key
                with _threads(threads):
                    self._measure(engine, setting, quality)
            return candidates(engine.dtype_speeds())
        finally:
            engine.close()

    def _sample(self, engine: BatchEngine[Any, Any, Any]) -> list[Work]:
        job = build(self._plan, engine, StopRequest(), Broadcast(()))
        work = sorted(survey(job, spread=True).work, key=lambda item: item.cost, reverse=True)
        if not work:
            raise ConfigError(f"{self._plan.settings.source} has no record that the model takes")
        return work

    def _measure(self, engine: BatchEngine[Any, Any, Any], setting: Setting, quality: tuple[str, bool]) -> None:
        new = list(_points(engine, setting, self._work, self._options, quality))
        self._rows += new
        top = max((row.measured.cost_per_s for row in new if row.passes), default=0.0)
        if top > self._fastest[0]:
            self._fastest = (top, *_one_and_many(engine, self._work))

    def result(self) -> Grid:
        """All of it. What is best is kept for the jobs to come, where they run the model so by themselves."""
        best = _choose(self._rows, self._options.latency_target_s)
        if best.setting.threads is None:
            TuningCache().write(self._keys[best.setting], {"budget": best.measured.budget})
        return Grid(tuple(self._rows), best, self._fastest[1], self._fastest[2], _cpu())


def _engines(settings: JobSettings) -> tuple[str, ...]:
    try:
        registry.folder_of(settings.task or "", settings.model, "onnx")
    except ConfigError:
        return ("torch",)
    return ("torch", "onnx")


def _ordered(dtypes: Sequence[str]) -> list[str]:
    return sorted(dtypes, key=lambda name: name != "float32")


def _compared(engine: BatchEngine[Any, Any, Any], work: Sequence[Work], reference: list[Any]) -> tuple[str, bool]:
    """How far the outputs are from the first engine's, and whether they are good enough."""
    step = max(1, len(work) // _COMPARED)
    outputs: list[Any] = []
    for batch in pack(work[::step], Shape(1_024, 64, engine.pads)):
        outputs += engine.forward([item.payload for item in batch])
    if not reference:
        reference += outputs
        return "", True
    deviation = compare(reference, outputs)
    return ("not comparable", False) if deviation is None else (str(deviation), deviation.passes)


def _points(
    engine: BatchEngine[Any, Any, Any],
    setting: Setting,
    work: Sequence[Work],
    options: GridOptions,
    quality: tuple[str, bool],
) -> Iterator[GridRow]:
    own = shape_of(JobSettings("", ""), engine)
    budgets = options.budgets or [round(own.budget * factor) for factor in _FACTORS]
    ways = max(len(options.engines or "x") * len(options.dtypes or "xx") * len(options.threads or "x"), 1)
    each = options.seconds / (len(budgets) * ways)
    for budget in budgets:
        batches = pack(work, Shape(budget, max(own.size, budget // 8), own.padded))
        try:
            measured, records_per_s = _point(engine, budget, _spread(batches), each)
        except EngineOutOfMemoryError:
            return  # a larger one would not fit either
        yield GridRow(setting, measured, records_per_s, *quality)


def _spread(batches: Sequence[Sequence[Work]]) -> list[Sequence[Work]]:
    """Every length early: the middle first, then the middles of the halves, and so on."""
    order: list[Sequence[Work]] = []
    spans = [(0, len(batches))]
    while spans:
        start, end = spans.pop(0)
        if start < end:
            middle = (start + end) // 2
            order.append(batches[middle])
            spans += [(start, middle), (middle + 1, end)]
    return order


def _point(
    engine: BatchEngine[Any, Any, Any], budget: int, batches: Sequence[Sequence[Work]], most_s: float
) -> tuple[Measured, float]:
    """Runs batches until the time is spent, each lot of them at least once."""
    engine.forward([item.payload for item in batches[0]])  # the first of a shape prepares itself
    meter = PeakMeter()
    counted = meter.restart()
    times: list[float] = []
    cost = computed = records = 0
    ends = time.perf_counter() + most_s
    for batch in batches:
        started = time.perf_counter()
        engine.forward([item.payload for item in batch])
        now = time.perf_counter()
        times.append(now - started)
        cost += sum(item.cost for item in batch)
        computed += len(batch) * max(item.cost for item in batch) if engine.pads else sum(item.cost for item in batch)
        records += len(batch)
        if now > ends:
            break
    seconds = sum(times)
    peak = meter.peak() if counted else None
    measured = Measured(budget, cost / seconds, statistics.median(times), 1 - cost / computed, peak)
    return measured, records / seconds


def _one_and_many(engine: BatchEngine[Any, Any, Any], work: Sequence[Work]) -> tuple[float, float]:
    """Seconds of a record of middling length alone, and of 32 like it: medians of some runs in turn."""
    middle = work[len(work) // 2].payload
    figures: tuple[list[float], list[float]] = ([], [])
    for _ in range(6):
        for place, count in enumerate((1, _MANY)):
            started = time.perf_counter()
            engine.forward([middle] * count)
            figures[place].append(time.perf_counter() - started)
    one, many = (statistics.median(times[1:]) for times in figures)
    return one, many


def _choose(rows: Sequence[GridRow], latency_target_s: float | None) -> GridRow:
    good = [row for row in rows if row.passes]
    if not good:
        raise ConfigError("no batch ran to its end: try smaller --budgets")
    point = knee([row.measured for row in good], latency_target_s)
    return next(row for row in good if row.measured is point)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """PyTorch's threads while the body runs."""
    if count is None:
        yield
        return
    native = importlib.import_module("headrace.device.native")  # PyTorch is imported where it is used alone
    before = native.set_threads(count)
    try:
        yield
    finally:
        native.set_threads(before)


def _cpu() -> str:
    facts = cpu_facts()
    return ", ".join([str(facts["cpu"]), *facts["instructions"]])
