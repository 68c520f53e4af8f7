"""Tuning advice from a job's figures: one setting each, and the gain to expect. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.observe.timeline import Cause

_BUSY_ENOUGH = 0.95
_PADDING_ENOUGH = 0.85
_MANY_FAILED = 0.1
_TOO_SHORT_S = 2.0
_WORTH = 0.05
"""Of the time from start to end: advice that gains less is not given."""
_BOTTLENECK = 0.7
"""A stage is the bottleneck if its work would fill this fraction of the time in which the job waited for it."""
_LIMITED = 0.5
"""Fraction of the batches that met the limit, from which on the limit decides how large batches are."""


_FIXED_ENOUGH = 0.05
"""Fraction of a batch that may be the same whatever is in it: above it, larger batches are worth trying."""
_MOST_LARGER = 16
"""Times as large as now: beyond it, the measured batches say too little."""
_PADDING_WANTED = 0.05
_WAITING = 0.5
"""A worker that computes in less than this fraction of its time waits for something else than a core."""
_MOST_WORKERS = 64


@dataclass(frozen=True, slots=True)
class Host:
    """What a run had for its host stages, and the limits of its batches."""

    cores: int = 1
    workers: int | None = None
    """Chunks prepared at once; None if the job chose that itself, up to the number of cores."""
    batch_size: int = 0
    """Records of a batch at most; 0 if unknown."""
    batch_cost: float = 0
    counts_tokens: bool = False
    """Whether cost is in tokens."""
    buffer_memory: int = 0
    """Bytes of rows and outputs at most; 0 if unknown."""
    slots: int = 0
    """Records in an engine that works in steps at most."""
    maps: bool = False
    """Whether a function of the user's prepares the rows."""
    finishes: bool = False
    """Whether a function of the user's finishes the outputs."""
    text_output: bool = False
    """Whether the output is written as text, which takes longer than Parquet."""

    def limit(self, *, by_size: bool) -> tuple[str, float]:
        """The flag of a limit of batches, and its value."""
        if by_size or not self.counts_tokens:
            return "--batch-size", self.batch_size
        return "--batch-tokens", self.batch_cost


@dataclass(frozen=True, slots=True)
class AdviceInputs:
    """The figures for the advice; times in seconds."""

    records: int
    """In this run, including failed ones."""
    failed: int
    batches: int
    wall_s: float
    """From the start of the job, with its model loaded, to its end."""
    busy: float
    """Fraction of it with a batch in the engine."""
    padding_efficiency: float
    host_s: Mapping[str, float]
    """Seconds by host stage: load, prepare, finish, write."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds by cause, the starting time included."""
    fixed_s: float | None = None
    """What a batch takes beside what grows with its cost."""
    limited_by_size: float = 0.0
    """Fraction of the batches that were closed because they had as many records as allowed."""
    limited_by_cost: float = 0.0
    """Fraction of the batches that were closed because more would have cost too much."""
    mean_cost: float = 0.0
    """Of a batch, padding included."""
    fill_s: float = 0.0
    """From the start of the job to its first batch, in which the device waits whatever is done."""
    out_of_memory: int = 0
    """Batches that ran out of memory and ran again in halves."""
    fitted: tuple[float, float] = (0.0, 0.0)
    """Records and computed cost of the largest batch that fitted, where some did not."""
    chunks: int = 1_000_000
    """Chunks of records that were prepared, each by one worker."""
    prepare_cpu_s: float | None = None
    """Seconds of a core that preparing took; None if unknown."""
    repeated: float = 0.0
    """Fraction of the records that are equal to an earlier one and computed again, of those that were compared."""
    slots_full: float = 0.0
    """Fraction of the steps with all slots taken."""
    tuning_s: float = 0.0
    """What it took to choose a data type, before the job started."""
    dtype: str = ""
    dtype_speed: float = 1.0
    """How many times as fast as in float32 the device computes a product in that type."""
    host: Host = Host()

    @property
    def device_s(self) -> float:
        """Seconds with a batch in the engine."""
        return self.wall_s * self.busy

    def lost(self, *causes: Cause) -> float:
        """Seconds that went into these causes."""
        return sum(self.causes.get(cause, 0.0) for cause in causes)

    @property
    def starved_s(self) -> float:
        """Seconds in which the device waited for records: the slowest stage before it explains all of them."""
        return self.lost("read", "prepare", "company")

    @property
    def blocked_s(self) -> float:
        """Seconds in which the device waited for results to leave, those after the last batch included."""
        return self.lost("finish", "write", "draining")

    @property
    def at_once(self) -> int:
        """Chunks that are prepared at once."""
        return self.host.workers or self.host.cores

    @property
    def waits_to_prepare(self) -> bool:
        """Whether preparing waits for something else than a core, such as another service."""
        used = self.prepare_cpu_s
        return used is not None and not self.locked and used < _WAITING * self.host_s.get("prepare", 0.0)

    @property
    def locked(self) -> bool:
        """Whether threads that prepare wait for Python's lock: together they keep one core busy and no more."""
        used, work = self.prepare_cpu_s, self.host_s.get("prepare", 0.0)
        return used is not None and self.at_once > 1 and _BOTTLENECK * self.wall_s < used < 0.75 * work

    def host_floor(self, without: str = "") -> float:
        """What the host's stages take at least, one of them left out."""
        host = self.host_s
        each = {
            "load": host.get("load", 0.0),
            "prepare": host.get("prepare", 0.0) / self.at_once,
            "sink": host.get("finish", 0.0) + host.get("write", 0.0),
        }
        return max(seconds for stage, seconds in each.items() if stage != without)

    def gain(self, lost: float, floor: float) -> float:
        """What is won of `lost` seconds, in a run that takes at least `floor`."""
        return max(min(lost, self.wall_s - floor), 0.0)

    def device_gain(self, saved: float) -> float:
        """What is won if the device computes so much less: nothing where the host would not keep up."""
        return max(min(saved, self.device_s - self.host_floor()), 0.0)


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    setting: str
    """The flag or setting, or what takes its place."""
    value: str
    """What to set it to; empty where it is not a setting."""
    text: str
    """One sentence."""
    gain_s: float
    """Seconds that it is expected to save, of a run like this one."""


def advise(numbers: AdviceInputs) -> str:
    """The most important advice: failures first, then what gains most."""
    if numbers.records == 0:
        return "Nothing was left to do."
    if numbers.failed > _MANY_FAILED * numbers.records:
        share = numbers.failed / numbers.records
        return f"{share:.0%} of the records failed: read the errors file before tuning anything."
    if numbers.batches == 0 or numbers.wall_s < _TOO_SHORT_S:
        return "The run was too short to find a bottleneck."
    found = advices(numbers)
    if found:
        return found[0].text
    if numbers.busy >= _BUSY_ENOUGH:
        return (
            f"The engine was busy {numbers.busy:.0%} of the time: the host is not the bottleneck; use a faster device, "
            "a lower precision or a smaller model."
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
    return f"bring busy to about {busy:.0%} and save {_of(numbers, gain_s)}"


def _of(numbers: AdviceInputs, gain_s: float) -> str:
    digits = 0 if numbers.wall_s >= 20 else 1
    return f"{gain_s:,.{digits}f} s of {numbers.wall_s:,.{digits}f} s"


def _rate(numbers: AdviceInputs, seconds: float) -> str:
    rate = numbers.records / seconds if seconds > 0 else math.inf
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _prepare(numbers: AdviceInputs) -> Advice | None:
    """The device waits for records to be prepared."""
    lost, work, at_once = numbers.starved_s, numbers.host_s.get("prepare", 0.0), numbers.at_once
    if not numbers.lost("prepare") or work / at_once < _BOTTLENECK * (numbers.device_s + lost):
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
        text = f"{words}; --workers {usable} would {_would_be(numbers, gain)}."
        return Advice("--workers", str(usable), text, gain)
    if numbers.host.maps and numbers.locked:
        gain = numbers.gain(lost, floor + numbers.fill_s / at_once)
        text = f"{words}, for Python runs one thread at a time; --worker-kind process would {_would_be(numbers, gain)}."
        return Advice("--worker-kind", "process", text, gain)
    gain = numbers.gain(lost, floor + numbers.fill_s)
    return Advice("cores", "", f"{words}; a machine with {wanted} cores would {_would_be(numbers, gain)}.", gain)


def _memory(numbers: AdviceInputs) -> Advice | None:
    """As many records as allowed are in memory, so that none is read."""
    lost, limit = numbers.lost("memory"), numbers.host.buffer_memory
    if not limit or not lost:
        return None
    gain = numbers.gain(lost, max(numbers.device_s, numbers.host_floor()))
    value = min(limit * 64, max(limit * 4, 512_000_000))  # the default, unless it is larger already
    return Advice(
        "--buffer-memory",
        str(value),
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} because as many records as --buffer-memory allows were in "
        f"memory: --buffer-memory {value} would {_would_be(numbers, gain)} at best.",
        gain,
    )


def _read(numbers: AdviceInputs) -> Advice | None:
    """The device waits for records to be read."""
    lost, work = numbers.starved_s, numbers.host_s.get("load", 0.0)
    if not numbers.lost("read") or work < _BOTTLENECK * (numbers.device_s + lost):
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
    if finish + write < _BOTTLENECK * (numbers.device_s + lost):
        return None
    gain = numbers.gain(lost, max(numbers.device_s, numbers.host_floor("sink")))
    what = "finished and encoded" if finish >= write else "written"
    host, flag, value = numbers.host, "", ""
    change = "a smaller output (fewer columns)" if finish >= write else "faster storage or a smaller output"
    if host.finishes and finish >= write:
        flag, value, change = "--worker-kind", "process", "a cheaper --finish function or --worker-kind process"
    elif host.text_output:
        flag, value, change = "--output-file", ".parquet", "a .parquet output, which is smaller and quicker to encode,"
    return Advice(
        flag,
        value,
        f"{_free(numbers)}, {lost / numbers.wall_s:.0%} waiting for results to be {what}: that gives "
        f"{_rate(numbers, finish + write)} records/s, the engine takes {_rate(numbers, numbers.device_s)}; {change} would "
        f"{_would_be(numbers, gain)} at best.",
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
    flag, _ = numbers.host.limit(by_size=False)
    unit = numbers.mean_cost if numbers.host.counts_tokens else numbers.records / numbers.batches
    value = _round(unit / times)
    return Advice(
        flag,
        str(value),
        f"{share:.0%} of what the engine computed was padding: {flag} {value} would batch records of more similar length, "
        f"which would save up to {_of(numbers, gain)}.",
        gain,
    )


def _round(value: float) -> int:
    """Two digits of a number are enough for a setting."""
    digits: int = max(math.floor(math.log10(max(value, 1.0))) - 1, 0)
    return max(int(round(value / 10**digits) * 10**digits), 1)


def _batches(numbers: AdviceInputs) -> Advice | None:
    """Batches are so small that what each takes beside its records counts."""
    by_size = numbers.limited_by_size >= numbers.limited_by_cost
    if not numbers.fixed_s or max(numbers.limited_by_size, numbers.limited_by_cost) < _LIMITED:
        return None
    flag, limit = numbers.host.limit(by_size=by_size)
    fixed = min(numbers.fixed_s * numbers.batches, numbers.device_s)
    wanted = fixed / max(numbers.device_s - fixed, 1e-9) / _FIXED_ENOUGH
    if not limit or wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), _MOST_LARGER)
    gain = numbers.device_gain(fixed * (1 - 1 / times))
    value = round(limit * times)
    return Advice(
        flag,
        str(value),
        f"Each of {numbers.batches:,} batches of {numbers.records / numbers.batches:,.0f} records takes "
        f"{numbers.fixed_s * 1000:,.1f} ms whatever is in it, {fixed / numbers.wall_s:.0%} of the time: "
        f"{flag} {value} would save about {_of(numbers, gain)}.",
        gain,
    )


def _slots(numbers: AdviceInputs) -> Advice | None:
    """So few records are generated at once that what each step takes beside its records counts."""
    slots = numbers.host.slots
    if not slots or not numbers.fixed_s or numbers.slots_full < _LIMITED:
        return None
    fixed = min(numbers.fixed_s * numbers.batches, numbers.device_s)
    wanted = fixed / max(numbers.device_s - fixed, 1e-9) / _FIXED_ENOUGH
    if wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), 4)
    gain = numbers.device_gain(fixed * (1 - 1 / times))
    return Advice(
        "--max-num-seqs",
        str(slots * times),
        f"Each of {numbers.batches:,} steps takes {numbers.fixed_s * 1000:,.1f} ms however many of {slots} records are in "
        f"it, {fixed / numbers.wall_s:.0%} of the time: --max-num-seqs {slots * times} would save about "
        f"{_of(numbers, gain)}.",
        gain,
    )


def _retry(numbers: AdviceInputs) -> Advice | None:
    """Batches run out of memory and run again."""
    if not numbers.out_of_memory:
        return None
    lost = numbers.lost("retry")
    gain = numbers.device_gain(lost)
    records, cost = numbers.fitted
    flag, _ = numbers.host.limit(by_size=False)
    value = math.floor(cost if flag == "--batch-tokens" else records)
    words = f"{flag} {value}" if value else f"a smaller {flag}"
    return Advice(
        flag,
        str(value) if value else "",
        f"{lost / numbers.wall_s:.0%} of the time went into batches that failed, {numbers.out_of_memory:,} of them for "
        f"lack of memory: {words} would save up to {_of(numbers, gain)}.",
        gain,
    )


def _duplicates(numbers: AdviceInputs) -> Advice | None:
    """Equal records are computed again and again."""
    gain = numbers.device_gain(numbers.device_s * numbers.repeated)
    return Advice(
        "--dedupe",
        "true",
        f"{numbers.repeated:.0%} of the records are equal to an earlier one and were computed again: --dedupe computes "
        f"them once, which would save about {_of(numbers, gain)}.",
        gain,
    )


def _starting(numbers: AdviceInputs) -> Advice | None:
    """Trying data types took long, beside the job itself."""
    if not numbers.dtype or numbers.tuning_s < 1:
        return None
    starting, total = numbers.lost("starting"), sum(numbers.causes.values())
    return Advice(
        "--dtype",
        numbers.dtype,
        f"Starting took {starting:,.0f} s of {total:,.0f} s, {numbers.tuning_s:,.0f} s of it to choose a data type: "
        f"--dtype {numbers.dtype} would save those {numbers.tuning_s:,.0f} s of the next run.",
        numbers.tuning_s,
    )


def _slow_dtype(numbers: AdviceInputs) -> Advice | None:
    """The device has no instructions for the data type."""
    if numbers.dtype_speed >= 1:
        return None
    gain = numbers.device_gain(numbers.device_s * (1 - numbers.dtype_speed))
    return Advice(
        "--dtype",
        "float32",
        f"This device computes {numbers.dtype} at {numbers.dtype_speed:.2g} times the speed of float32: "
        f"--dtype float32 would save about {_of(numbers, gain)}, in a new job or with --ignore-changes.",
        gain,
    )


_RULES: tuple[Callable[[AdviceInputs], Advice | None], ...] = (
    _prepare,
    _read,
    _company,
    _memory,
    _sink,
    _padding,
    _batches,
    _slots,
    _retry,
    _duplicates,
    _starting,
    _slow_dtype,
)
