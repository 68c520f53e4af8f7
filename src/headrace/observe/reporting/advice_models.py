"""Advice for what a language model reads, for a model too small for its device, and for more devices. Pure."""

from __future__ import annotations

import math
import shlex
import string

from headrace.events import EndpointUsed
from headrace.observe.reporting.advice_inputs import FIXED_ENOUGH, LIMITED, Advice, AdviceInputs, saving
from headrace.wording import flag_of

_SHOWN = 200
"""Characters of a template that are shown in a sentence."""


def slots(numbers: AdviceInputs) -> Advice | None:
    """So few records are generated at once that what each step takes beside its records counts."""
    now = numbers.host.slots
    if not now or not numbers.step_fixed_s or numbers.slots_full < LIMITED:
        return None
    each = numbers.step_fixed_s
    fixed = min(each * numbers.batches, numbers.device_s)
    wanted = fixed / max(numbers.device_s - fixed, 1e-9) / FIXED_ENOUGH
    if wanted < 2:
        return None
    times = min(2 ** math.ceil(math.log2(wanted)), 4)
    gain = numbers.device_gain(fixed * (1 - 1 / times))
    return Advice(
        flag_of("max_num_seqs"),
        str(now * times),
        f"Each of {numbers.batches:,} steps takes {each * 1000:,.1f} ms with any number of its {now} "
        f"records, {fixed / numbers.wall_s:.0%} of the time: ``max_num_seqs={now * times}`` would save about "
        f"{saving(numbers, gain)}.",
        gain,
    )


def template(numbers: AdviceInputs) -> Advice | None:
    """The prompts begin with what differs, so that their common text is read again and again."""
    found = numbers.prompts
    if found is None or found.template is None:
        return None
    gain = _reading_gain(numbers, found.better)
    fields = ", ".join(name for _, name, _, _ in string.Formatter().parse(found.template) if name is not None)
    shown = f"={_quoted(found.template)}" if len(found.template) <= _SHOWN else ""
    return Advice(
        flag_of("prompt_template"),
        found.template,
        f"{_cached(numbers):.0%} of the prompt tokens came from the prefix cache: a new job with "
        f"``prompt_template{shown}``, its fields in the order {fields}, would have {found.better:.0%} of the prompts' "
        f"text in common beginnings and save up to {saving(numbers, gain)}.",
        gain,
    )


def _quoted(text: str) -> str:
    """Text for a shell, in one line."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"$'{escaped}'"


def order(numbers: AdviceInputs) -> Advice | None:
    """Prompts that begin alike are far from each other, and the job must keep the order of the input."""
    found = numbers.prompts
    if found is None or not numbers.host.keeps_order:
        return None
    gain = _reading_gain(numbers, found.shared)
    return Advice(
        flag_of("order"),
        "auto",
        f"{_cached(numbers):.0%} of the prompt tokens came from the prefix cache, in the order of the input: "
        f"``order=auto`` would put prompts that begin alike beside each other, which have {found.shared:.0%} of their "
        f"text in common, and save up to {saving(numbers, gain)}.",
        gain,
    )


def _cached(numbers: AdviceInputs) -> float:
    """The fraction of the prompt tokens that came from the cache."""
    used = numbers.prefix_cache
    return used.hits / used.queries if used is not None and used.queries else 0.0


def _reading_gain(numbers: AdviceInputs, cached: float) -> float:
    """What is won if this fraction of the prompts comes from the cache."""
    used, now = numbers.prefix_cache, _cached(numbers)
    if used is None or not used.computed or cached <= now:
        return 0.0
    if used.computed_s is None:  # at most: a token of an answer takes as long as one of a prompt, or longer
        reading_s = numbers.device_s * used.computed / (used.computed + used.generated)
    else:
        reading_s = used.computed_s / max(numbers.lanes, 1)
    return numbers.device_gain(reading_s * (cached - now) / (1 - now))


def small_model(numbers: AdviceInputs) -> Advice | None:
    """The device mostly waits for launches, and larger batches do not help."""
    device = numbers.device
    if device is None or device.limit != "launch" or not numbers.fixed_s or numbers.lanes:
        return None
    if numbers.limited_by_size >= LIMITED or (numbers.limited_by_cost >= LIMITED and numbers.larger_pay is not False):
        return None  # larger batches are worth trying first
    fixed = min(numbers.fixed_s * numbers.batches, numbers.device_s)
    gain = numbers.device_gain(fixed / 2)
    used = "" if device.mfu is None else f", which computes at {device.mfu:.0%} of its peak"
    return Advice(
        flag_of("shard"),
        "0/2",
        f"The model is too small for this device{used}: each of {numbers.batches:,} batches takes "
        f"{numbers.fixed_s * 1000:,.1f} ms regardless of its size, {fixed / numbers.wall_s:.0%} of the time; two jobs "
        f"at once, with ``shard=0/2`` and ``shard=1/2``, would save up to {saving(numbers, gain)}, or a "
        "cheaper device "
        "would do.",
        gain,
    )


def endpoint(used: EndpointUsed, busy: float) -> str:
    """What the servers of a job did with its requests, and what would help."""
    if used.limited:
        fewer = max(used.at_once * (used.sent - used.limited) // used.sent, 1)
        return (
            f"The server limits the rate: {used.limited:,} of {used.sent:,} requests were refused (429) and sent "
            f"again: ``concurrency={fewer}`` would send fewer of them in vain; a higher limit there, or another "
            "``endpoints``, would save time."
        )
    if used.unanswered:
        return (
            f"{used.unanswered:,} of {used.sent:,} requests found no server and were sent again: look at why it was "
            "away before tuning anything."
        )
    return (
        f"The server was at work {busy:.0%} of the time: more requests at once (``concurrency``, now {used.at_once}) "
        "or "
        "another ``endpoints`` may be faster."
    )


def replicas(numbers: AdviceInputs) -> Advice | None:
    """The device limits the job, and there is room for others."""
    now, host = max(numbers.lanes, 1), numbers.host
    most = host.replicas
    if most <= now:
        return None
    useful = math.ceil(now * numbers.device_s / max(numbers.host_floor(), 1e-9))  # more would wait for the host
    value = max(min(most, useful), now + 1)
    gain, one_more = (numbers.device_gain(numbers.device_s * (1 - now / count)) for count in (value, now + 1))
    words = f", the first of them {saving(numbers, one_more)}" if value > now + 1 else ""
    engines = "one engine" if now == 1 else f"{now} engines"
    return Advice(
        flag_of(host.replicas_setting),
        str(value),
        f"The engine was busy {numbers.busy:.0%} of the time, with {engines} where the devices have room for {most}: "
        f"``{host.replicas_setting}={value}`` would save up to {saving(numbers, gain)}{words}.",
        gain,
    )
