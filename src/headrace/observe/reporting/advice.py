"""Tuning advice from a job's figures: one rule each, for one setting and the gain to expect. Pure."""

from __future__ import annotations

import math
import shlex
import string
from collections.abc import Callable

from headrace.events import CloseReason, EndpointUsed
from headrace.observe.accounting.timeline import Cause
from headrace.observe.reporting.run_facts import Advice
from headrace.observe.reporting.run_figures import Report
from headrace.wording import flag_of

_BOTTLENECK = 0.7
"""A stage is the bottleneck if its work would fill this fraction of the time in which the job waited for it."""
_WAITING = 0.5
"""A worker that computes in less than this fraction of its time waits for something else than a core."""
_LIMITED = 0.5
"""Fraction of the batches that met the limit, from which on the limit decides how large batches are."""
_FIXED_ENOUGH = 0.05
"""Fraction of a batch that may be the same whatever is in it: above it, larger batches are worth trying."""
_BUSY_ENOUGH = 0.95
_PADDING_ENOUGH = 0.85
TOO_SHORT_S = 2.0
"""A shorter run has no bottleneck that is worth telling."""
WORTH = 0.05
"""A fraction of the wall time: advice that gains less is not given."""
_MOST_LARGER = 16
"""Times as large as now: beyond it, the measured batches say too little."""
_PADDING_WANTED = 0.05
_MOST_WORKERS = 64
_MANY_FAILED = 0.1
_ENOUGH = 1_000
"""Records that show whether many fail, as long as the job has not ended."""
_SHOWN = 200
"""Characters of a template that are shown in a sentence."""


def advise(run: Report) -> str:
    """The most important advice: failures first, then what gains most."""
    if run.records == 0:
        return "Nothing was left to do."
    if failures := _many_failed(run):
        return f"{failures}: read the errors file before tuning anything."
    if run.batches == 0 or run.wall_s < TOO_SHORT_S:
        return "The run was too short to find a bottleneck."
    found = advices(run)
    if found:
        return found[0].text
    if run.endpoint is not None:
        return _endpoint(run.endpoint, run.busy)
    if run.busy >= _BUSY_ENOUGH:
        return (
            f"The engine was busy {run.busy:.0%} of the time: the host is not the bottleneck; use a faster device, "
            f"a lower precision or a smaller model{_second_device(run)}."
        )
    if _lost(run, "draining") + run.fill_s >= (1 - run.busy) * run.wall_s / 2:
        return f"{_free(run)}, most of it before the first batch or after the last: a longer run will be busier."
    return f"{_free(run)}, and no single setting explains it: look at what it waited for over time."


def advices(run: Report) -> list[Advice]:
    """Everything that is worth changing, what gains most first."""
    if not run.records or not run.batches or run.wall_s < TOO_SHORT_S:
        return []
    found = [advice for rule in _RULES if (advice := rule(run)) is not None]
    worth = [advice for advice in found if advice.gain_s >= WORTH * run.wall_s]
    return sorted(worth, key=lambda advice: -advice.gain_s)


def _free(run: Report) -> str:
    return f"The engine was free {1 - run.busy:.0%} of the time"


def _would_be(run: Report, gain_s: float) -> str:
    busy = min(_device_s(run) / max(run.wall_s - gain_s, _device_s(run), 1e-9), 1.0)
    return f"bring busy to about {busy:.0%} and save {_saving(run, gain_s)}"


def _rate(run: Report, seconds: float) -> str:
    rate = run.records / seconds if seconds > 0 else math.inf
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _prepare(run: Report) -> Advice | None:
    lost, work, at_once = _starved_s(run), run.times.prepare, _at_once(run)
    if not _lost(run, "prepare") or work / at_once < _BOTTLENECK * (_device_s(run) + lost):
        return None
    floor = max(_device_s(run), _host_floor(run, "prepare"))
    wanted = max(math.ceil(work / max(floor, 1e-9)), at_once + 1)  # one more where they just keep up
    words = (
        f"{_free(run)}, {lost / run.wall_s:.0%} waiting for records to be prepared: {at_once} at once give "
        f"{_rate(run, work / at_once)} records/s, the engine takes {_rate(run, _device_s(run))}"
    )
    spare = max(wanted // 4, 1)
    usable = min(wanted + spare, _MOST_WORKERS) if _waits_to_prepare(run) else min(wanted, run.host.cores)
    setting = "prepare_processes" if run.host.preparers else "workers"
    if usable > at_once:
        rounds = math.ceil(run.prepared_chunks / usable) / max(
            run.prepared_chunks, 1
        )  # no worker takes a part of a chunk
        gain = _gain(run, lost, max(floor + run.fill_s, work * rounds + run.fill_s))
        text = f"{words}; ``{setting}={usable}`` would {_would_be(run, gain)}."
        return Advice(flag_of(setting), str(usable), text, gain)
    if (run.host.maps or run.host.preparers == 0) and _locked(run):
        gain = _gain(run, lost, floor + run.fill_s / at_once)
        setting, value = ("worker_kind", "process") if run.host.maps else ("prepare_processes", str(usable))
        text = f"{words}, for Python runs one thread at a time; ``{setting}={value}`` would {_would_be(run, gain)}."
        return Advice(flag_of(setting), value, text, gain)
    gain = _gain(run, lost, floor + run.fill_s)
    return Advice("cores", "", f"{words}; a machine with {wanted} cores would {_would_be(run, gain)}.", gain)


def _memory(run: Report) -> Advice | None:
    """As many records as allowed are in memory, so that none is read, and parts are small."""
    lost, limit = _lost(run, "memory", "finish", "write"), run.host.buffer_memory
    work = run.times.finish + run.times.write
    if not limit or not _lost(run, "memory") or work >= _BOTTLENECK * (_device_s(run) + lost):
        return None
    gain = _gain(run, lost, max(_device_s(run), _host_floor(run)))
    value = max(limit * 4, 64_000_000)  # an eighth of the default, unless it is larger already
    return Advice(
        flag_of("buffer_memory"),
        str(value),
        f"{_free(run)}, {lost / run.wall_s:.0%} because as many records as ``buffer_memory`` allows were in "
        f"memory: ``buffer_memory={value}`` would {_would_be(run, gain)} at best.",
        gain,
    )


def _read(run: Report) -> Advice | None:
    lost, work = _starved_s(run), run.times.load
    if not _lost(run, "read") or work < _BOTTLENECK * (_device_s(run) + lost):
        return None
    gain = _gain(run, lost, max(_device_s(run), _host_floor(run, "load")))
    return Advice(
        "input",
        "",
        f"{_free(run)}, {lost / run.wall_s:.0%} waiting for the input: reading gives {_rate(run, work)} "
        f"records/s, the engine takes {_rate(run, _device_s(run))}; faster storage or a columnar file such as "
        f"Parquet would {_would_be(run, gain)} at best.",
        gain,
    )


def _company(run: Report) -> Advice | None:
    """The batcher holds records back although the device is free."""
    lost = _lost(run, "company")
    if lost <= max(_lost(run, "prepare"), _lost(run, "read")) or _prepare(run) or _read(run):
        return None
    return Advice(
        "batch_delay_s",
        "0",
        f"{_free(run)}, {lost / run.wall_s:.0%} because the batcher held records back for more to join them: "
        f"batch_delay_s=0 in the engine's profile would {_would_be(run, lost)}.",
        lost,
    )


def _sink(run: Report) -> Advice | None:
    """The job waits for its results to be finished, encoded and written."""
    lost, finish, write = _lost(run, "finish", "write", "draining"), run.times.finish, run.times.write
    if finish + write < _BOTTLENECK * (_device_s(run) + lost):
        return None
    gain = _gain(run, lost, max(_device_s(run), _host_floor(run, "sink")))
    what = "finished and encoded" if finish >= write else "written"
    host, setting, value = run.host, "", ""
    change = "a smaller output (fewer columns)" if finish >= write else "faster storage or a smaller output"
    if host.finishes and finish >= write:
        setting, value, change = "worker_kind", "process", "a cheaper ``finish`` function or ``worker_kind=process``"
    elif host.text_output:
        setting, value, change = "sink", ".parquet", "a .parquet output, which is smaller and quicker to encode,"
    return Advice(
        setting and flag_of(setting),
        value,
        f"{_free(run)}, {lost / run.wall_s:.0%} waiting for results to be {what}: that gives "
        f"{_rate(run, finish + write)} records/s, the engine takes {_rate(run, _device_s(run))}; {change} "
        f"would {_would_be(run, gain)} at best.",
        gain,
    )


def _padding(run: Report) -> Advice | None:
    """Too much of what is computed is padding, because large batches hold records of different lengths."""
    share = 1 - run.padding_efficiency
    if share <= 1 - _PADDING_ENOUGH or not run.mean_cost:
        return None
    if _starved_s(run) > _lost(run, "padding"):
        return None  # where the device waits, too few records wait to choose from
    times = min(2 ** math.ceil(math.log2(share / _PADDING_WANTED)), _MOST_LARGER)
    saved = _lost(run, "padding") * (1 - 1 / times) - (run.fixed_s or 0.0) * run.batches * (times - 1)
    gain = _device_gain(run, saved)
    setting, _ = run.host.limit(by_size=False)
    unit = run.mean_cost if run.host.counts_tokens else run.records / run.batches
    value = _round(unit / times)
    return Advice(
        flag_of(setting),
        str(value),
        f"{share:.0%} of what the engine computed was padding: ``{setting}={value}`` would batch records of more "
        f"similar length, which would save up to {_saving(run, gain)}.",
        gain,
    )


def _round(value: float) -> int:
    digits: int = max(math.floor(math.log10(max(value, 1.0))) - 1, 0)
    return max(int(round(value / 10**digits) * 10**digits), 1)


def _batches(run: Report) -> Advice | None:
    """Batches are so small that what each takes beside its records counts."""
    by_size = _limited(run, "full_size") >= _limited(run, "full_cost")
    if not run.fixed_s or max(_limited(run, "full_size"), _limited(run, "full_cost")) < _LIMITED:
        return None
    if not by_size and _larger_pay(run) is False:
        return None  # as was measured
    setting, limit = run.host.limit(by_size=by_size)
    fixed = min(run.fixed_s * run.batches, _device_s(run))
    wanted = fixed / max(_device_s(run) - fixed, 1e-9) / _FIXED_ENOUGH
    if not limit or wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), _MOST_LARGER)
    gain = _device_gain(run, fixed * (1 - 1 / times))
    value = round(limit * times)
    return Advice(
        flag_of(setting),
        str(value),
        f"Each of {run.batches:,} batches of {run.records / run.batches:,.0f} records takes "
        f"{run.fixed_s * 1000:,.1f} ms regardless of its size, {fixed / run.wall_s:.0%} of the time: "
        f"``{setting}={value}`` would save about {_saving(run, gain)}.",
        gain,
    )


def _retry(run: Report) -> Advice | None:
    if not run.out_of_memory:
        return None
    lost = _lost(run, "retry")
    gain = _device_gain(run, lost)
    records, cost = run.fitted
    setting, _ = run.host.limit(by_size=False)
    value = math.floor(cost if setting == "batch_tokens" else records)
    words = f"``{setting}={value}``" if value else f"a smaller ``{setting}``"
    return Advice(
        flag_of(setting),
        str(value) if value else "",
        f"{lost / run.wall_s:.0%} of the time went into batches that failed, {run.out_of_memory:,} of them for "
        f"lack of memory: {words} would save up to {_saving(run, gain)}.",
        gain,
    )


def _duplicates(run: Report) -> Advice | None:
    """Equal records are computed again and again."""
    gain = _device_gain(run, _device_s(run) * run.repeated)
    return Advice(
        flag_of("dedupe"),
        "true",
        f"{run.repeated:.0%} of the records are equal to an earlier one and were computed again: ``dedupe=True`` "
        f"computes them once, which would save about {_saving(run, gain)}.",
        gain,
    )


def _starting(run: Report) -> Advice | None:
    """Trying data types took long, beside the job itself."""
    chosen = run.precision
    if chosen is None or chosen.duration_s < 1:
        return None
    starting, total = _lost(run, "starting"), sum(run.causes.values())
    return Advice(
        flag_of("dtype"),
        chosen.dtype,
        f"Starting took {starting:,.0f} s of {total:,.0f} s, {chosen.duration_s:,.0f} s of it to choose a data type: "
        f"``dtype={chosen.dtype}`` would save those {chosen.duration_s:,.0f} s of the next run.",
        chosen.duration_s,
    )


def _slow_dtype(run: Report) -> Advice | None:
    """The device has no instructions for the data type."""
    chosen = run.precision
    if chosen is None or chosen.speed >= 1:
        return None
    gain = _device_gain(run, _device_s(run) * (1 - chosen.speed))
    return Advice(
        flag_of("dtype"),
        "float32",
        f"This device computes {chosen.dtype} at {chosen.speed:.2g} times the speed of float32: "
        f"``dtype=float32`` would save about {_saving(run, gain)}, in a new job or with ``ignore_changes=True``.",
        gain,
    )


def _slots(run: Report) -> Advice | None:
    """So few records are generated at once that what each step takes beside its records counts."""
    now = run.host.slots
    if run.step_size is not None or not now or not _step_fixed_s(run) or run.slots_full < _LIMITED:
        return None
    each = _step_fixed_s(run)
    fixed = min(each * run.batches, _device_s(run))
    wanted = fixed / max(_device_s(run) - fixed, 1e-9) / _FIXED_ENOUGH
    if wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), 4)
    gain = _device_gain(run, fixed * (1 - 1 / times))
    return Advice(
        flag_of("max_num_seqs"),
        str(now * times),
        f"Each of {run.batches:,} steps takes {each * 1000:,.1f} ms with any number of its {now} "
        f"records, {fixed / run.wall_s:.0%} of the time: ``max_num_seqs={now * times}`` would save about "
        f"{_saving(run, gain)}.",
        gain,
    )


def _template(run: Report) -> Advice | None:
    """The prompts begin with what differs, so that their common text is read again and again."""
    found = run.prompts
    if found is None or found.template is None:
        return None
    gain = _reading_gain(run, found.better)
    fields = ", ".join(name for _, name, _, _ in string.Formatter().parse(found.template) if name is not None)
    shown = f"={_quoted(found.template)}" if len(found.template) <= _SHOWN else ""
    return Advice(
        flag_of("prompt_template"),
        found.template,
        f"{_cached(run):.0%} of the prompt tokens came from the prefix cache: a new job with "
        f"``prompt_template{shown}``, its fields in the order {fields}, would have {found.better:.0%} of the prompts' "
        f"text in common beginnings and save up to {_saving(run, gain)}.",
        gain,
    )


def _quoted(text: str) -> str:
    """Text for a shell, in one line."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"$'{escaped}'"


def _order(run: Report) -> Advice | None:
    """Prompts that begin alike are far from each other, and the job must keep the order of the input."""
    found = run.prompts
    if found is None or not run.host.keeps_order:
        return None
    gain = _reading_gain(run, found.shared)
    return Advice(
        flag_of("order"),
        "auto",
        f"{_cached(run):.0%} of the prompt tokens came from the prefix cache, in the order of the input: "
        f"``order=auto`` would put prompts that begin alike beside each other, which have {found.shared:.0%} of their "
        f"text in common, and save up to {_saving(run, gain)}.",
        gain,
    )


def _cached(run: Report) -> float:
    used = run.prefix_cache
    return used.hits / used.queries if used is not None and used.queries else 0.0


def _reading_gain(run: Report, cached: float) -> float:
    """What is won if this fraction of the prompts comes from the cache."""
    used, now = run.prefix_cache, _cached(run)
    if used is None or not used.computed or cached <= now:
        return 0.0
    if used.computed_s is None:  # at most: a token of an answer takes as long as one of a prompt, or longer
        reading_s = _device_s(run) * used.computed / (used.computed + used.generated)
    else:
        reading_s = used.computed_s / max(len(run.lanes), 1)
    return _device_gain(run, reading_s * (cached - now) / (1 - now))


def _small_model(run: Report) -> Advice | None:
    """The device mostly waits for launches, and larger batches do not help."""
    device = run.device
    if device is None or device.limit != "launch" or not run.fixed_s or run.lanes:
        return None
    if _limited(run, "full_size") >= _LIMITED or (
        _limited(run, "full_cost") >= _LIMITED and _larger_pay(run) is not False
    ):
        return None  # larger batches are worth trying first
    fixed = min(run.fixed_s * run.batches, _device_s(run))
    gain = _device_gain(run, fixed / 2)
    used = "" if device.mfu is None else f", which computes at {device.mfu:.0%} of its peak"
    return Advice(
        flag_of("shard"),
        "0/2",
        f"The model is too small for this device{used}: each of {run.batches:,} batches takes "
        f"{run.fixed_s * 1000:,.1f} ms regardless of its size, {fixed / run.wall_s:.0%} of the time; two jobs "
        f"at once, with ``shard=0/2`` and ``shard=1/2``, would save up to {_saving(run, gain)}, or a cheaper device "
        "would do.",
        gain,
    )


def _endpoint(used: EndpointUsed, busy: float) -> str:
    """What the servers of a job did with its requests, and what would help."""
    if used.limited:
        fewer = max(used.at_once * (used.sent - used.limited) // used.sent, 1)
        return (
            f"The server limits the rate: {used.limited:,} of {used.sent:,} requests were refused (429) and sent "
            f"again: ``requests_per_minute``, or ``concurrency={fewer}``, would send fewer of them in vain; a higher "
            "limit there, or another ``endpoints``, would save time."
        )
    if used.held > used.sent / 2:
        return (
            f"{used.held:,} of {used.sent:,} requests waited for the limit of the rate (``requests_per_minute``, "
            "``tokens_per_minute``, or what the server told): only a higher limit, or another ``endpoints``, saves "
            "time."
        )
    if used.unanswered:
        return (
            f"{used.unanswered:,} of {used.sent:,} requests found no server and were sent again: look at why it was "
            "away before tuning anything."
        )
    return (
        f"The server was at work {busy:.0%} of the time: more requests at once (``concurrency``, now {used.at_once}) "
        "or another ``endpoints`` may be faster."
    )


def _replicas(run: Report) -> Advice | None:
    """The device limits the job, and there is room for others."""
    now, host = max(len(run.lanes), 1), run.host
    most = host.replicas
    if most <= now:
        return None
    useful = math.ceil(now * _device_s(run) / max(_host_floor(run), 1e-9))  # more would wait for the host
    value = max(min(most, useful), now + 1)
    gain, one_more = (_device_gain(run, _device_s(run) * (1 - now / count)) for count in (value, now + 1))
    words = f", the first of them {_saving(run, one_more)}" if value > now + 1 else ""
    engines = "one engine" if now == 1 else f"{now} engines"
    return Advice(
        flag_of(host.replicas_setting),
        str(value),
        f"The engine was busy {run.busy:.0%} of the time, with {engines} where the devices have room for {most}: "
        f"``{host.replicas_setting}={value}`` would save up to {_saving(run, gain)}{words}.",
        gain,
    )


def _second_device(run: Report) -> str:
    now = max(len(run.lanes), 1)
    gain = _device_gain(run, _device_s(run) / (now + 1))
    if gain < WORTH * run.wall_s:
        return ""
    if run.lanes:
        return f"; another worker, on a device of the same speed, would save up to {_saving(run, gain)}"
    return f"; a second device of the same speed would save up to {_saving(run, gain)}"


def _device_s(run: Report) -> float:
    return run.wall_s * run.busy


def _lost(run: Report, *causes: Cause) -> float:
    return sum(run.causes.get(cause, 0.0) for cause in causes)


def _starved_s(run: Report) -> float:
    """Seconds in which the device waited for records: the slowest stage before it explains all of them."""
    return _lost(run, "read", "prepare", "company")


def _at_once(run: Report) -> int:
    threads = run.host.workers or run.host.cores
    return min(threads, run.host.preparers) if run.host.preparers else threads


def _waits_to_prepare(run: Report) -> bool:
    """Whether preparing waits for something else than a core, such as another service."""
    used = run.prepare_cpu_s
    return used is not None and not run.host.preparers and not _locked(run) and used < _WAITING * run.times.prepare


def _locked(run: Report) -> bool:
    """Whether threads that prepare wait for Python's lock: together they keep one core busy and no more."""
    used = run.prepare_cpu_s
    return used is not None and _at_once(run) > 1 and _BOTTLENECK * run.wall_s < used < 0.75 * run.times.prepare


def _step_fixed_s(run: Report) -> float:
    """What a step takes beside what grows with its tokens.

    Where all steps have equally many records, prompts tell what a token takes: they are read many tokens at a time.
    """
    used = run.prefix_cache
    if run.fixed_s is not None or used is None or not used.computed or used.computed_s is None:
        return run.fixed_s or 0.0
    token_s = used.computed_s / used.computed
    rest = _device_s(run) - used.computed_s - used.generated * token_s
    return max(rest, 0.0) / max(run.batches, 1)


def _limited(run: Report, reason: CloseReason) -> float:
    """The fraction of the batches that were closed for this reason."""
    return run.close_reasons.get(reason, 0) / max(sum(run.close_reasons.values()), 1)


def _host_floor(run: Report, without: str = "") -> float:
    """What the host's stages take at least, one of them left out."""
    times = run.times
    each = {"load": times.load, "prepare": times.prepare / _at_once(run), "sink": times.finish + times.write}
    return max(seconds for stage, seconds in each.items() if stage != without)


def _larger_pay(run: Report) -> bool | None:
    """Whether batches larger than the largest budget allowed would be faster; None if unknown."""
    return run.memory.larger_pay if run.memory is not None else None


def _gain(run: Report, lost: float, floor: float) -> float:
    """What is won of `lost` seconds, in a run that takes at least `floor`."""
    return max(min(lost, run.wall_s - floor), 0.0)


def _device_gain(run: Report, saved: float) -> float:
    """What is won if the device computes so much less: nothing where the host would not keep up."""
    return max(min(saved, _device_s(run) - _host_floor(run)), 0.0)


def _saving(run: Report, gain_s: float) -> str:
    digits = 0 if run.wall_s >= 20 else 1
    return f"{gain_s:,.{digits}f} s of {run.wall_s:,.{digits}f} s"


def _many_failed(run: Report) -> str:
    """Says that many records failed; empty if few did, or if it is too early to say."""
    records, failed = run.records, run.failed
    if run.retry:
        return f"{failed:,} of {records:,} records failed again" if failed > _MANY_FAILED * records else ""
    records, failed = records + run.skipped, failed + run.skipped_failed
    if failed <= _MANY_FAILED * records or (run.state == "interrupted" and records < _ENOUGH):
        return ""
    return f"{failed / records:.0%} of the records{'' if run.state == 'finished' else ' so far'} failed"


_RULES: tuple[Callable[[Report], Advice | None], ...] = (
    _prepare,
    _read,
    _company,
    _memory,
    _sink,
    _padding,
    _batches,
    _slots,
    _template,
    _order,
    _small_model,
    _retry,
    _duplicates,
    _starting,
    _slow_dtype,
    _replicas,
)
