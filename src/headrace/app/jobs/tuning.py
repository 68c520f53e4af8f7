"""Choose the dtype of a job by trying it on the job's own records."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.app.jobs.plan import Plan
from headrace.app.jobs.vllm_arguments import found_arguments, with_arguments
from headrace.device.precision import INT8, LEAST_GAIN, candidates, compare, likely_saving
from headrace.engines.base import BatchEngine, Engine
from headrace.engines.capabilities import BATCHES, TUNING, TunableEngine
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.engines.profile import EngineProfile
from headrace.errors import EngineDeadError, EngineError, JobError, ResumeMismatchError, attempted
from headrace.events import PrecisionChosen
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.forecast import pack
from headrace.jobs.planning.measuring import timed
from headrace.jobs.planning.survey import Survey
from headrace.jobs.settings import JobSettings
from headrace.wording import spelled

logger = logging.getLogger("headrace")

_MOST_S = 10.0
_MOST_SHARE = 0.01
"""Maximum share of the job's forecast time for trying."""
WORTH_S = 4.0
"""A job that can save less stays in float32: loading the model twice and trying would take about as long."""
_UNKNOWN_S = 1.0
"""Seconds for trying if the length of the job is unknown."""
_MOST_RECORDS = 2_000
BATCH_SHARE = 0.25
"""Cost of a job's trial batches, as a share of the engine's own: more batches show more lengths in the same time."""
_LEAST_BATCHES = 5
"""The fewest batches to run in both dtypes, if the sample has them: other work may disturb a single one."""
_EMULATED = 0.35
"""A resumed job is refused where a product is computed at less than this speed of float32, and goes on otherwise.

Without bfloat16 instructions, a CPU with AVX-512 converts the numbers and reaches 0.25 to 0.8; one with AVX2 0.2."""
_SLOWER = 0.95
"""Below this, the user is told: less is noise."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """An engine, and why it runs in its dtype."""

    engine: Engine
    precision: PrecisionChosen | None
    """None for an engine that chooses its own dtype."""


def settings_to_load(plan: Plan) -> JobSettings:
    """The settings for the engine; a resumed job keeps the dtype it was started with."""
    settings = plan.settings
    config = settings.config
    if settings.overwrite or not (is_auto(config) or is_int8(config)):
        return settings
    if config.declaration is not None and not config.has_option("dtype"):
        return settings
    facts = _started(plan) or {}
    dtype = facts.get("dtype")
    if config.declaration is None and "module" not in facts:
        return settings  # an engine of the user's own that may not have the option
    if not isinstance(dtype, str):
        return settings
    return replace(settings, config=in_dtype(settings.config, dtype))


def _started(plan: Plan) -> Mapping[str, object] | None:
    """What the engine of a resumed job said of itself when the job began; None for a new one."""
    try:
        state = None if plan.settings.overwrite else plan.output.read_state()
    except JobError:
        return None  # starting the job reports the error
    facts = state.fingerprint.get("engine") if state else None
    return facts if isinstance(facts, Mapping) else None


def in_dtype(config: EngineConfig, dtype: str | None) -> EngineConfig:
    """The same engine in this dtype; "int8" quantises it, and None leaves the choice to the engine."""
    options = {name: value for name, value in config.engine_options.items() if name not in ("dtype", "quantize")}
    chosen = {} if dtype is None else {"quantize": INT8} if dtype == INT8 else {"dtype": dtype}
    return replace(config, engine_options={**options, **chosen})


def is_int8(config: EngineConfig) -> bool:
    """Whether the user wants 8-bit integers, where they pass."""
    return bool(config.engine_options.get("quantize") == INT8)


def exact(config: EngineConfig) -> EngineConfig:
    """The engine to compare others with."""
    return in_dtype(config, str(config.engine_options.get("dtype", "auto"))) if is_int8(config) else config


def load(plan: Plan) -> Engine:
    """Load the model; a resumed job keeps what it was started with and the user leaves open. Blocks.

    Raises:
        ConfigError, EngineError: the model cannot be loaded.
        ResumeMismatchError: this machine only emulates that dtype.
    """
    settings = settings_to_load(plan)
    if settings is plan.settings:
        config = exact(settings.config)
        return load_engine(with_arguments(config, found_arguments(config, _started(plan))))
    engine = load_engine(settings.config)
    _check_native(plan, str(settings.config.engine_options.get("dtype", INT8)), engine)
    return engine


def _check_native(plan: Plan, dtype: str, engine: Engine) -> None:
    speed = tunable.dtype_speeds().get(dtype, 1.0) if (tunable := TUNING.of(engine)) else 1.0
    if speed >= _EMULATED:
        return
    engine.close()
    raise ResumeMismatchError(
        f"{plan.output.target} was started in {dtype}, which this machine computes at {speed:.2g} times the speed of "
        f"float32: continue on a machine like the first, pass ``dtype={dtype}`` to continue here nevertheless, or "
        "``dtype=float32, ignore_changes=True`` to compute the rest in float32"
    )


def wants_sample(plan: Plan, engine: Engine) -> bool:
    """Whether `tune` has anything to try on a sample."""
    tunable = TUNING.of(engine)
    return tunable is not None and not _settled(plan, tunable)


def tune(plan: Plan, engine: Engine, survey: Survey | None, profile: EngineProfile) -> Tuned:
    """The engine in the fastest dtype whose outputs for a sample of the job's records are as good as float32's.

    Args:
        engine: as loaded; closed if another replaces it.
        survey: of the job's records; None if they were not sampled.
    """
    tunable = TUNING.of(engine)
    if tunable is None:
        return Tuned(engine, None)
    dtype = str(engine.describe().get("dtype", ""))
    why = _settled(plan, tunable)
    if why or not dtype:
        return Tuned(engine, _said(dtype, why, tunable) if dtype else None)
    work, records = ((), None) if survey is None else (survey.work, survey.records)
    return try_on(tunable, plan.settings.config, work, records, profile)


def try_on(
    tunable: TunableEngine, config: EngineConfig, work: Sequence[Work], records: int | None, profile: EngineProfile
) -> Tuned:
    """The engine in the fastest dtype that passes on this sample; the engine itself if none does.

    Args:
        tunable: in a dtype of its own or float32; closed if another replaces it.
        records: that the engine will compute; None if unknown.
    """
    started = time.monotonic()
    dtype = str(tunable.describe().get("dtype", ""))
    if why := is_settled(tunable, config):
        return Tuned(tunable, _said(dtype, why, tunable) if dtype else None)
    batches = batches_of(work, replace(profile, batch_cost=profile.batch_cost * BATCH_SHARE)) if work else []
    first = to_try(tunable, config)[0]
    speed = tunable.dtype_speeds().get(first, math.inf)
    allowed = _allowance(tunable, batches, work, records, likely_saving(speed))
    if is_int8(config) and batches:
        allowed = max(allowed or 0.0, _UNKNOWN_S)  # it was asked for
    if allowed is None:
        short = "no record" if not batches else "too few records"
        return Tuned(tunable, _chosen(dtype, f"{short} to try {first}", started))
    return try_faster(tunable, config, batches, allowed)


def try_faster(engine: TunableEngine, config: EngineConfig, batches: Sequence[Sequence[Work]], allowed: float) -> Tuned:
    """The engine in the first faster dtype that passes on these batches; the engine itself if none does.

    Args:
        engine: in float32; closed if another replaces it.
        allowed: seconds that this may take, without loading.
    """
    started = time.monotonic()
    details: list[str] = []
    for name in to_try(engine, config):
        other, detail = _try(engine, name, config, batches, allowed)
        if other is not None:
            engine.close()
            return Tuned(other, _chosen(name, "; ".join([detail, *details]), started))
        details.append(detail)
        if name == INT8:
            logger.warning("%s is not used: %s", spelled(f"``quantize={INT8}``"), detail)
    return Tuned(engine, _chosen("float32", "; ".join(details), started))


def _settled(plan: Plan, engine: TunableEngine) -> str:
    """Why there is nothing to try; empty if there is something."""
    config = plan.settings.config
    if settings_to_load(plan) is not plan.settings:
        return "as when the job was started"
    return is_settled(engine, config) or (
        "the input is an iterator: there is no sample to try another dtype on" if is_read_once(plan) else ""
    )


def is_settled(engine: TunableEngine, config: EngineConfig) -> str:
    """Why there is nothing to try with this engine, whatever its records; empty if there is something."""
    if not (is_auto(config) or is_int8(config)):
        return "as set"
    if engine.describe().get("dtype") != "float32":
        return "the weights' own"
    return none_faster(engine, config)


def is_read_once(plan: Plan) -> bool:
    """Whether a sample of the input could not be read again."""
    return hasattr(plan.settings.source, "__next__") or hasattr(plan.settings.source, "__anext__")


def to_try(engine: TunableEngine, config: EngineConfig) -> list[str]:
    """The types worth trying, best first."""
    return [INT8] * is_int8(config) + (candidates(engine.dtype_speeds()) if is_auto(config) else [])


def none_faster(engine: TunableEngine, config: EngineConfig) -> str:
    """Why no other dtype is worth trying on the device; empty if one is."""
    speeds = engine.dtype_speeds()
    if to_try(engine, config):
        return ""
    if not speeds:
        return "this model is too small to gain from another dtype"
    return ", ".join(f"{name} is {speed:.2g} times as fast here" for name, speed in speeds.items())


def is_auto(config: EngineConfig) -> bool:
    return bool(config.engine_options.get("dtype", "auto") == "auto")


def _said(dtype: str, why: str, engine: TunableEngine) -> PrecisionChosen:
    """A choice that is not Headrace's, so that it took no time; warns if it is slow on this device."""
    speed = engine.dtype_speeds().get(dtype, 1.0)
    started = time.monotonic()
    if speed >= _SLOWER:
        return _chosen(dtype, why, started)
    slow = f"this device computes it at {speed:.2g} times the speed of float32"
    logger.warning("the job runs in %s: %s", dtype, slow)
    return replace(_chosen(dtype, f"{why}; {slow}", started), speed=speed)


def _chosen(dtype: str, detail: str, started: float) -> PrecisionChosen:
    now = time.monotonic()
    return PrecisionChosen(dtype, detail, now - started, now)


def batches_of(work: Sequence[Work], profile: EngineProfile) -> list[Sequence[Work]]:
    """Batches of the sample in random order, so that all lengths occur early."""
    step = max(1, len(work) // _MOST_RECORDS)
    batches = pack(sorted(work[::step], key=lambda item: item.cost, reverse=True), profile)
    random.Random(0).shuffle(batches)
    return batches


def _allowance(
    engine: BatchEngine, batches: Sequence[Sequence[Work]], work: Sequence[Work], records: int | None, saving: float
) -> float | None:
    """How many seconds trying may take; None if the job is too short for a saving of this share of its time."""
    if not work or records is None:
        return _UNKNOWN_S if work else None
    first = batches[0]
    timed_forward(engine, first)  # the first batch of a shape is slower
    _, seconds = timed_forward(engine, first)
    forecast = seconds / sum(item.cost for item in first) * sum(item.cost for item in work) / len(work) * records
    return min(_MOST_S, _MOST_SHARE * forecast) if forecast * saving >= WORTH_S else None


def _try(
    engine: BatchEngine, name: str, config: EngineConfig, batches: Sequence[Sequence[Work]], allowed: float
) -> tuple[Engine | None, str]:
    """The engine in this dtype, and why it is used; or None, and why it is not."""
    try:
        other = load_engine(in_dtype(config, name))
    except EngineError as error:
        return None, f"{name} cannot be loaded: {error}"
    faster = BATCHES.of(other)
    assert faster is not None, "it is loaded as the first was"
    gain, exact, tried = _run_both(engine, faster, batches, allowed)
    deviation = compare(exact, tried)
    detail = f"the outputs of {name} cannot be compared"
    if deviation is not None:
        if deviation.passes and gain >= LEAST_GAIN:
            return other, f"{gain:.1f} times as fast as float32, {deviation}"
        detail = f"{name} is too far off: {deviation}"
        if deviation.passes:
            detail = f"{name} is {gain:.2f} times as fast as float32 here, and {LEAST_GAIN:g} times is required"
        elif deviation.broken:
            detail = f"{name} gives {deviation}"
            logger.warning("this model does not work in %s (%s); it runs in float32", name, deviation)
    other.close()
    return None, detail


def _run_both(
    engine: BatchEngine, other: BatchEngine, batches: Sequence[Sequence[Work]], most_s: float
) -> tuple[float, list[object], list[object]]:
    """How many times as fast the other is, and the outputs of both for the same batches; ends when the time is up.

    The fastest batch of each counts: other work on the machine makes a batch longer, never shorter.
    """
    fastest = [math.inf, math.inf]  # seconds per cost
    outputs: tuple[list[object], list[object]] = ([], [])
    timed_forward(other, batches[0])
    ends = time.perf_counter() + most_s
    for tried, batch in enumerate(batches, start=1):
        cost = sum(item.cost for item in batch)
        for place, one in enumerate((engine, other)):
            found, seconds = timed_forward(one, batch)
            fastest[place] = min(fastest[place], seconds / cost)
            outputs[place].extend(found)
        if tried >= _LEAST_BATCHES and time.perf_counter() > ends:
            break
    return fastest[0] / fastest[1], *outputs


def timed_forward(engine: BatchEngine, batch: Sequence[Work]) -> tuple[Sequence[object], float]:
    """Outputs and seconds; if the batch fails, its error for each record."""
    started = time.perf_counter()
    found = attempted(timed, engine, batch)
    if isinstance(found, EngineDeadError):
        raise found
    if isinstance(found, BaseException):  # the job will name the record
        found = [found] * len(batch), time.perf_counter() - started
    return found[0], max(found[1], 1e-9)
