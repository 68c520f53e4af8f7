"""Tuning advice from a job's figures: one setting each, and the gain to expect. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.observe.reporting.advice_inputs import BOTTLENECK, FIXED_ENOUGH, LIMITED, saving
from headrace.observe.reporting.advice_inputs import Advice as Advice
from headrace.observe.reporting.advice_inputs import AdviceInputs as AdviceInputs
from headrace.observe.reporting.advice_inputs import Host as Host
from headrace.observe.reporting.advice_models import endpoint, order, replicas, slots, small_model, template
from headrace.wording import flag_of

_BUSY_ENOUGH = 0.95
_PADDING_ENOUGH = 0.85
_TOO_SHORT_S = 2.0
_WORTH = 0.05
"""Of the time from start to end: advice that gains less is not given."""
_MOST_LARGER = 16
"""Times as large as now: beyond it, the measured batches say too little."""
_PADDING_WANTED = 0.05
_MOST_WORKERS = 64


def advise(numbers: AdviceInputs) -> str:
    """The most important advice: failures first, then what gains most."""
    if numbers.records == 0:
        return "Nothing was left to do."
    if numbers.failures:
        return f"{numbers.failures}: read the errors file before tuning anything."
    if numbers.batches == 0 or numbers.wall_s < _TOO_SHORT_S:
        return "The run was too short to find a bottleneck."
    found = advices(numbers)
    if found:
        return found[0].text
    if numbers.endpoint is not None:
        return endpoint(numbers.endpoint, numbers.busy)
    if numbers.busy >= _BUSY_ENOUGH:
        return (
            f"The engine was busy {numbers.busy:.0%} of the time: the host is not the bottleneck; use a faster device, "
            f"a lower precision or a smaller model{_second_device(numbers)}."
        )
    if numbers.lost("draining") + numbers.fill_s >= (1 - numbers.busy) * numbers.wall_s / 2:
        return f"{_free(numbers)}, most of it before the first batch or after the last: a longer run will be busier."
    return f"{_free(numbers)}, and no single setting explains it: look at what it waited for over time."


def advices(numbers: AdviceInputs) -> list[Advice]:
    """Everything that is worth changing, what gains most first."""
    if not numbers.records or not numbers.batches or numbers.wall_s < _TOO_SHORT_S:
        return []
    found = [advice for rule in _RULES if (advice := rule(numbers)) is not None]
    worth = [advice for advice in found if advice.gain_s >= _WORTH * numbers.wall_s]
    return sorted(worth, key=lambda advice: -advice.gain_s)


def _free(numbers: AdviceInputs) -> str:
    return f"The engine was free {1 - numbers.busy:.0%} of the time"


def _would_be(numbers: AdviceInputs, gain_s: float) -> str:
    busy = min(numbers.device_s / max(numbers.wall_s - gain_s, numbers.device_s, 1e-9), 1.0)
    return f"bring busy to about {busy:.0%} and save {saving(numbers, gain_s)}"


def _rate(numbers: AdviceInputs, seconds: float) -> str:
    rate = numbers.records / seconds if seconds > 0 else math.inf
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _prepare(numbers: AdviceInputs) -> Advice | None:
    """The device waits for records to be prepared."""
    lost, work, at_once = numbers.starved_s, numbers.host_s.get("prepare", 0.0), numbers.at_once
    if not numbers.lost("prepare") or work / at_once < BOTTLENECK * (numbers.device_s + lost):
        return None
    floor = max(numbers.device_s, numbers.host_floor("prepare"))
    wanted = max(math.ceil(work / max(floor, 1e-9)), at_once + 1)  # one more where they just keep up
    words = (
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} waiting for records to be prepared: {at_once} at once give "
        f"{_rate(numbers, work / at_once)} records/s, the engine takes {_rate(numbers, numbers.device_s)}"
    )
    spare = max(wanted // 4, 1)
    usable = min(wanted + spare, _MOST_WORKERS) if numbers.waits_to_prepare else min(wanted, numbers.host.cores)
    if usable > at_once:
        rounds = math.ceil(numbers.chunks / usable) / max(numbers.chunks, 1)  # no worker takes a part of a chunk
        gain = numbers.gain(lost, max(floor + numbers.fill_s, work * rounds + numbers.fill_s))
        text = f"{words}; ``workers={usable}`` would {_would_be(numbers, gain)}."
        return Advice(flag_of("workers"), str(usable), text, gain)
    if numbers.host.maps and numbers.locked:
        gain = numbers.gain(lost, floor + numbers.fill_s / at_once)
        text = (
            f"{words}, for Python runs one thread at a time; ``worker_kind=process`` would {_would_be(numbers, gain)}."
        )
        return Advice(flag_of("worker_kind"), "process", text, gain)
    gain = numbers.gain(lost, floor + numbers.fill_s)
    return Advice("cores", "", f"{words}; a machine with {wanted} cores would {_would_be(numbers, gain)}.", gain)


def _memory(numbers: AdviceInputs) -> Advice | None:
    """As many records as allowed are in memory, so that none is read, and parts are small."""
    lost, limit = numbers.lost("memory", "finish", "write"), numbers.host.buffer_memory
    work = numbers.host_s.get("finish", 0.0) + numbers.host_s.get("write", 0.0)
    if not limit or not numbers.lost("memory") or work >= BOTTLENECK * (numbers.device_s + lost):
        return None
    gain = numbers.gain(lost, max(numbers.device_s, numbers.host_floor()))
    value = max(limit * 4, 64_000_000)  # an eighth of the default, unless it is larger already
    return Advice(
        flag_of("buffer_memory"),
        str(value),
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} because as many records as ``buffer_memory`` allows were in "
        f"memory: ``buffer_memory={value}`` would {_would_be(numbers, gain)} at best.",
        gain,
    )


def _read(numbers: AdviceInputs) -> Advice | None:
    """The device waits for records to be read."""
    lost, work = numbers.starved_s, numbers.host_s.get("load", 0.0)
    if not numbers.lost("read") or work < BOTTLENECK * (numbers.device_s + lost):
        return None
    gain = numbers.gain(lost, max(numbers.device_s, numbers.host_floor("load")))
    return Advice(
        "input",
        "",
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} waiting for the input: reading gives {_rate(numbers, work)} "
        f"records/s, the engine takes {_rate(numbers, numbers.device_s)}; faster storage or a columnar file such as "
        f"Parquet would {_would_be(numbers, gain)} at best.",
        gain,
    )


def _company(numbers: AdviceInputs) -> Advice | None:
    """The batcher holds records back although the device is free."""
    lost = numbers.lost("company")
    if lost <= max(numbers.lost("prepare"), numbers.lost("read")) or _prepare(numbers) or _read(numbers):
        return None
    return Advice(
        "batch_delay_s",
        "0",
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} because the batcher held records back for more to join them: "
        f"batch_delay_s=0 in the engine's profile would {_would_be(numbers, lost)}.",
        lost,
    )


def _sink(numbers: AdviceInputs) -> Advice | None:
    """The job waits for its results to be finished, encoded and written."""
    lost, finish, write = numbers.blocked_s, numbers.host_s.get("finish", 0.0), numbers.host_s.get("write", 0.0)
    if finish + write < BOTTLENECK * (numbers.device_s + lost):
        return None
    gain = numbers.gain(lost, max(numbers.device_s, numbers.host_floor("sink")))
    what = "finished and encoded" if finish >= write else "written"
    host, setting, value = numbers.host, "", ""
    change = "a smaller output (fewer columns)" if finish >= write else "faster storage or a smaller output"
    if host.finishes and finish >= write:
        setting, value, change = "worker_kind", "process", "a cheaper ``finish`` function or ``worker_kind=process``"
    elif host.text_output:
        setting, value, change = "sink", ".parquet", "a .parquet output, which is smaller and quicker to encode,"
    return Advice(
        setting and flag_of(setting),
        value,
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} waiting for results to be {what}: that gives "
        f"{_rate(numbers, finish + write)} records/s, the engine takes {_rate(numbers, numbers.device_s)}; {change} "
        f"would {_would_be(numbers, gain)} at best.",
        gain,
    )


def _padding(numbers: AdviceInputs) -> Advice | None:
    """Too much of what is computed is padding: a batch holds so many records that their lengths differ."""
    share = 1 - numbers.padding_efficiency
    if share <= 1 - _PADDING_ENOUGH or not numbers.mean_cost:
        return None
    if numbers.starved_s > numbers.lost("padding"):
        return None  # where the device waits, too few records wait to choose from
    times = min(2 ** math.ceil(math.log2(share / _PADDING_WANTED)), _MOST_LARGER)
    saved = numbers.lost("padding") * (1 - 1 / times) - (numbers.fixed_s or 0.0) * numbers.batches * (times - 1)
    gain = numbers.device_gain(saved)
    setting, _ = numbers.host.limit(by_size=False)
    unit = numbers.mean_cost if numbers.host.counts_tokens else numbers.records / numbers.batches
    value = _round(unit / times)
    return Advice(
        flag_of(setting),
        str(value),
        f"{share:.0%} of what the engine computed was padding: ``{setting}={value}`` would batch records of more "
        "similar "
        f"length, which would save up to {saving(numbers, gain)}.",
        gain,
    )


def _round(value: float) -> int:
    """Two digits of a number are enough for a setting."""
    digits: int = max(math.floor(math.log10(max(value, 1.0))) - 1, 0)
    return max(int(round(value / 10**digits) * 10**digits), 1)


def _batches(numbers: AdviceInputs) -> Advice | None:
    """Batches are so small that what each takes beside its records counts."""
    by_size = numbers.limited_by_size >= numbers.limited_by_cost
    if not numbers.fixed_s or max(numbers.limited_by_size, numbers.limited_by_cost) < LIMITED:
        return None
    if not by_size and numbers.larger_pay is False:
        return None  # as was measured
    setting, limit = numbers.host.limit(by_size=by_size)
    fixed = min(numbers.fixed_s * numbers.batches, numbers.device_s)
    wanted = fixed / max(numbers.device_s - fixed, 1e-9) / FIXED_ENOUGH
    if not limit or wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), _MOST_LARGER)
    gain = numbers.device_gain(fixed * (1 - 1 / times))
    value = round(limit * times)
    return Advice(
        flag_of(setting),
        str(value),
        f"Each of {numbers.batches:,} batches of {numbers.records / numbers.batches:,.0f} records takes "
        f"{numbers.fixed_s * 1000:,.1f} ms regardless of its size, {fixed / numbers.wall_s:.0%} of the time: "
        f"``{setting}={value}`` would save about {saving(numbers, gain)}.",
        gain,
    )


def _retry(numbers: AdviceInputs) -> Advice | None:
    """Batches run out of memory and run again."""
    if not numbers.out_of_memory:
        return None
    lost = numbers.lost("retry")
    gain = numbers.device_gain(lost)
    records, cost = numbers.fitted
    setting, _ = numbers.host.limit(by_size=False)
    value = math.floor(cost if setting == "batch_tokens" else records)
    words = f"``{setting}={value}``" if value else f"a smaller ``{setting}``"
    return Advice(
        flag_of(setting),
        str(value) if value else "",
        f"{lost / numbers.wall_s:.0%} of the time went into batches that failed, {numbers.out_of_memory:,} of them for "
        f"lack of memory: {words} would save up to {saving(numbers, gain)}.",
        gain,
    )


def _duplicates(numbers: AdviceInputs) -> Advice | None:
    """Equal records are computed again and again."""
    gain = numbers.device_gain(numbers.device_s * numbers.repeated)
    return Advice(
        flag_of("dedupe"),
        "true",
        f"{numbers.repeated:.0%} of the records are equal to an earlier one and were computed again: ``dedupe=True`` "
        "computes "
        f"them once, which would save about {saving(numbers, gain)}.",
        gain,
    )


def _starting(numbers: AdviceInputs) -> Advice | None:
    """Trying data types took long, beside the job itself."""
    if not numbers.dtype or numbers.tuning_s < 1:
        return None
    starting, total = numbers.lost("starting"), sum(numbers.causes.values())
    return Advice(
        flag_of("dtype"),
        numbers.dtype,
        f"Starting took {starting:,.0f} s of {total:,.0f} s, {numbers.tuning_s:,.0f} s of it to choose a data type: "
        f"``dtype={numbers.dtype}`` would save those {numbers.tuning_s:,.0f} s of the next run.",
        numbers.tuning_s,
    )


def _slow_dtype(numbers: AdviceInputs) -> Advice | None:
    """The device has no instructions for the data type."""
    if numbers.dtype_speed >= 1:
        return None
    gain = numbers.device_gain(numbers.device_s * (1 - numbers.dtype_speed))
    return Advice(
        flag_of("dtype"),
        "float32",
        f"This device computes {numbers.dtype} at {numbers.dtype_speed:.2g} times the speed of float32: "
        f"``dtype=float32`` would save about {saving(numbers, gain)}, in a new job or with ``ignore_changes=True``.",
        gain,
    )


def _second_device(numbers: AdviceInputs) -> str:
    now = max(numbers.lanes, 1)
    gain = numbers.device_gain(numbers.device_s / (now + 1))
    if gain < _WORTH * numbers.wall_s:
        return ""
    if numbers.lanes:
        return f"; another worker, on a device of the same speed, would save up to {saving(numbers, gain)}"
    return f"; a second device of the same speed would save up to {saving(numbers, gain)}"


_RULES: tuple[Callable[[AdviceInputs], Advice | None], ...] = (
    _prepare,
    _read,
    _company,
    _memory,
    _sink,
    _padding,
    _batches,
    slots,
    template,
    order,
    small_model,
    _retry,
    _duplicates,
    _starting,
    _slow_dtype,
    replicas,
)
