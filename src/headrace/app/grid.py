"""Measure a model at several budgets, dtypes, thread counts and engines, for `headrace tune`."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from headrace.app.jobs.budgets import find_key
from headrace.app.jobs.downloads import downloaded_model
from headrace.app.jobs.job import Broadcast, build, check
from headrace.app.jobs.plan import Plan
from headrace.app.jobs.tuning import in_dtype
from headrace.batching.policy.cost import batch_cost
from headrace.device.budget import Measured, knee
from headrace.device.cache import TuningCache, described_cpu
from headrace.device.precision import candidates, compare
from headrace.engines.base import BatchEngine
from headrace.engines.capabilities import TUNING, TunableEngine, memory_of
from headrace.engines.choosing import registry
from headrace.engines.choosing.loading import load_engine
from headrace.engines.profile import profile_of
from headrace.errors import ConfigError, EngineOutOfMemoryError
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.forecast import pack
from headrace.jobs.planning.measuring import timed
from headrace.jobs.planning.survey import survey
from headrace.jobs.settings import JobSettings

_MANY = 32
_IN_FLIGHT = 2
"""Batches on the way in a device that overlaps them, as in jobs."""
_TURN = 4
"""Batches of a point that run after one another on such a device: the first and the last overlap with nothing."""
_FACTORS = (0.5, 1, 2, 4, 8, 16)
"""The budgets to measure, as multiples of the engine's own."""
_COMPARED = 256
"""Records whose outputs are compared with those in float32."""


@dataclass(frozen=True, slots=True)
class GridOptions:
    """The settings to measure."""

    budgets: tuple[int, ...] = ()
    """Budgets of a batch; empty for half to 16 times the engine's default."""
    dtypes: tuple[str, ...] = ()
    """Empty for float32 and the dtypes that the device computes faster."""
    threads: tuple[int, ...] = ()
    """Thread counts of PyTorch; empty for its default."""
    engines: tuple[str, ...] = ()
    """Empty for torch, and onnx if the model's folder has an ONNX file."""
    seconds: float = 60.0
    """About how long to measure, without loading."""
    latency_target_s: float | None = None
    """Maximum seconds of a batch."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a model, without its budget."""

    engine: str
    dtype: str
    threads: int | None
    """None for the engine's default."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """One point of the curve."""

    setting: Setting
    measured: Measured
    records_per_s: float
    off: str
    """Deviation of its outputs from those in float32; empty for float32."""
    passes: bool
    """Whether the outputs are good enough."""


@dataclass(frozen=True, slots=True)
class Grid:
    """All measurements, and the best setting."""

    rows: tuple[GridRow, ...]
    chosen: GridRow
    one_s: float
    """Seconds of a batch of one record of median length, in the chosen setting."""
    many_s: float
    """Seconds of a batch of 32 such records."""
    cpu: str


def measure(settings: JobSettings, options: GridOptions, say: Callable[[str], None]) -> Grid:
    """Measure a sample of the input at every point. Blocks. The best budget is stored for later jobs on this machine.

    All engines stay loaded, and the points take turns, so that other work on the machine affects them all.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used, or the engine cannot be tuned.
        JobError: the input cannot be read.
        EngineError: a model cannot be loaded.
    """
    points: list[_Point] = []
    work: list[Work] = []
    reference: list[object] = []
    with check(settings) as plan, ExitStack() as loaded:
        if (model := downloaded_model(plan.settings)) is not None:
            say(f"measuring {model}")
        for name in options.engines or _engines(plan.settings):
            todo = (
                ["as exported"]
                if name == "onnx"
                else sorted(options.dtypes, key=lambda one: one != "float32") or ["float32"]
            )
            while todo:
                dtype = todo.pop(0)
                say(f"loading {name} in {dtype} ...")
                engine = _loaded(plan, name, dtype)
                loaded.callback(engine.close)
                work = work or _sample(plan, engine)
                off, passes = _compared(engine, work, reference)
                key = find_key(engine, plan.settings.config.task or "")
                for threads in (options.threads if name != "onnx" else ()) or (None,):
                    way = _LoadedSetting(Setting(name, dtype, threads), engine, key, off, passes)
                    points += _points(way, work, options.budgets)
                if not options.dtypes and dtype == "float32":
                    todo += candidates(engine.dtype_speeds())
        return _measured(points, work, options)


def _loaded(plan: Plan, name: str, dtype: str) -> TunableEngine:
    config = replace(plan.settings.config, engine=name)
    loaded = load_engine(in_dtype(config, None if name == "onnx" else dtype))
    engine = TUNING.of(loaded)
    if engine is None:
        loaded.close()
        raise ConfigError(f"task {config.task!r} has no batches to tune: its engine batches by itself")
    return engine


def _sample(plan: Plan, engine: BatchEngine) -> list[Work]:
    job = build(plan, engine, StopRequest(), Broadcast(()))
    work = sorted(survey(job, spread=True).work, key=lambda item: item.cost, reverse=True)
    if not work:
        raise ConfigError(f"{plan.settings.source} has no record that the model takes")
    return work


def _measured(points: Sequence[_Point], work: Sequence[Work], options: GridOptions) -> Grid:
    """Measure all points. The best budget is stored if it is for the default number of threads, as in jobs."""
    for point in points:
        point.weigh()  # also because the first batch of a shape is slower
    ends = time.perf_counter() + options.seconds
    while True:
        for point in points:
            point.run()
        if time.perf_counter() > ends:
            break
    rows = [(row, point.way) for point in points if (row := point.row()) is not None]
    best = _choose([row for row, _ in rows], options.latency_target_s)
    way = next(way for row, way in rows if row is best)
    if best.setting.threads is None:
        TuningCache().write(way.key, {"budget": best.measured.budget})
    with _threads(best.setting.threads):
        one, many = _one_and_many(way.engine, work)
    return Grid(tuple(row for row, _ in rows), best, one, many, described_cpu())


@dataclass(frozen=True, slots=True)
class _LoadedSetting:
    """A loaded engine, and the quality of its outputs."""

    setting: Setting
    engine: BatchEngine
    key: dict[str, object]
    off: str
    passes: bool

    @property
    def overlaps(self) -> bool:
        """Whether a job has two batches on the way."""
        return profile_of(self.engine).overlaps


def _engines(settings: JobSettings) -> tuple[str, ...]:
    if settings.config.commit is not None:  # an ONNX copy is downloaded only if asked for
        return ("torch",)
    try:
        registry.folder_of(settings.config.task or "", settings.config.model, "onnx")
    except ConfigError:
        return ("torch",)
    return ("torch", "onnx")


def _compared(engine: BatchEngine, work: Sequence[Work], reference: list[object]) -> tuple[str, bool]:
    """The deviation of the outputs from the first engine's, which become the reference; and if they are good enough."""
    step = max(1, len(work) // _COMPARED)
    outputs: list[object] = []
    for batch in pack(work[::step], profile_of(engine)):
        outputs += _outputs(engine, batch)
    if not reference:
        reference += outputs
        return "", True
    deviation = compare(reference, outputs)
    return ("not comparable", False) if deviation is None else (str(deviation), deviation.passes)


def _outputs(engine: BatchEngine, batch: Sequence[Work]) -> list[object]:
    try:
        return list(timed(engine, batch)[0])
    except EngineOutOfMemoryError:
        if len(batch) == 1:
            raise
        half = len(batch) // 2
        return _outputs(engine, batch[:half]) + _outputs(engine, batch[half:])


def _points(way: _LoadedSetting, work: Sequence[Work], budgets: Sequence[int]) -> Iterator[_Point]:
    own = profile_of(way.engine)
    for budget in budgets or [round(own.batch_cost * factor) for factor in _FACTORS]:
        shape = replace(own, batch_cost=budget, batch_size=max(own.batch_size, budget // 8))
        yield _Point(way, budget, pack(work, shape))


def _spread(batches: Sequence[Sequence[Work]]) -> list[Sequence[Work]]:
    """In an order that has every length early: the middle first, then the middles of the halves, and so on."""
    order: list[Sequence[Work]] = []
    spans = [(0, len(batches))]
    while spans:
        start, end = spans.pop(0)
        if start < end:
            middle = (start + end) // 2
            order.append(batches[middle])
            spans += [(start, middle), (middle + 1, end)]
    return order


class _Point:
    """One point of the curve, measured batch by batch.

    Args:
        batches: costliest first.
    """

    def __init__(self, way: _LoadedSetting, budget: int, batches: Sequence[Sequence[Work]]) -> None:
        self.way = way
        self._budget = budget
        self._longest = batches[0]
        self._batches = _spread(batches)
        self._fits = True
        self._next = 0
        self._times: list[float] = []
        self._wall = self._cost = self._computed = 0.0
        self._records = 0
        self._peak: int | None = None

    def weigh(self) -> None:
        """Measure how much memory the longest records take. Not timed: the meter makes a GPU give its memory back."""
        _, meter = memory_of(self.way.engine)
        meter = meter if meter is not None and meter.restart() else None
        self._forward([self._longest] * (_IN_FLIGHT if self.way.overlaps else 1))
        self._peak = meter.peak() if meter is not None else None

    def run(self) -> None:
        """Run some more batches. A budget that does not fit is dropped."""
        if not self._fits:
            return
        count = _TURN if self.way.overlaps else 1
        batches = [self._batches[(self._next + place) % len(self._batches)] for place in range(count)]
        started = time.perf_counter()
        times = self._forward(batches)
        self._wall += time.perf_counter() - started
        self._next += count
        self._times += times
        for batch in batches[: len(times)]:
            costs: list[float] = [item.cost for item in batch]
            self._cost += sum(costs)
            self._computed += batch_cost(costs, padded=profile_of(self.way.engine).pads)
            self._records += len(batch)

    def _forward(self, batches: Sequence[Sequence[Work]]) -> list[float]:
        with _threads(self.way.setting.threads):
            try:
                if len(batches) == 1:
                    return [timed(self.way.engine, batches[0])[1]]
                with ThreadPoolExecutor(_IN_FLIGHT) as pool:
                    return list(pool.map(lambda batch: timed(self.way.engine, batch)[1], batches))
            except EngineOutOfMemoryError:
                self._fits = False
                return []

    def row(self) -> GridRow | None:
        if not self._fits or not self._times:
            return None
        seconds, way = self._wall, self.way
        padding = 1 - self._cost / self._computed
        measured = Measured(self._budget, self._cost / seconds, statistics.median(self._times), padding, self._peak)
        return GridRow(way.setting, measured, self._records / seconds, way.off, way.passes)


def _one_and_many(engine: BatchEngine, work: Sequence[Work]) -> tuple[float, float]:
    """Seconds of one record of median length, and of 32 copies of it: medians of some runs in turn."""
    middle = work[len(work) // 2]
    figures: tuple[list[float], list[float]] = ([], [])
    for _ in range(6):
        for place, count in enumerate((1, _MANY)):
            started = time.perf_counter()
            _outputs(engine, [middle] * count)
            figures[place].append(time.perf_counter() - started)
    one, many = (statistics.median(times[1:]) for times in figures)
    return one, many


def _choose(rows: Sequence[GridRow], latency_target_s: float | None) -> GridRow:
    good = [row for row in rows if row.passes]
    if not good:
        raise ConfigError("no batch ran to its end: try smaller ``budgets``")
    point = knee([row.measured for row in good], latency_target_s)
    return next(row for row in good if row.measured is point)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's threads while the body runs."""
    if count is None:
        yield
        return
    native = importlib.import_module("headrace.device.native")  # imports PyTorch, which ONNX does not need
    before = native.set_threads(count)
    try:
        yield
    finally:
        native.set_threads(before)
