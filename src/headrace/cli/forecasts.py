"""Print the survey and the forecast of a job."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

from headrace.cli.outcome import say
from headrace.jobs.pipeline.job import OrderPlan
from headrace.jobs.planning.forecast import Forecast
from headrace.jobs.planning.repeats import Repeats
from headrace.jobs.planning.survey import Survey

_ENOUGH_ROOM = 1_000
"""Times the batch budget: more is not worth a word."""
_SHOWN = 100
"""Characters shown of an example."""


def print_survey(survey: Survey) -> None:
    """Print the survey in short, before a run."""
    for left_out in survey.left_out:
        say(f"left out of the input: {left_out}")
    if survey.sampled:
        whole = survey.counted and survey.sampled == survey.records
        sampled = "" if whole else f"; of the first {survey.sampled:,}"
        say(f"{_records(survey)}{sampled}: {_lengths(survey)}")


def print_forecast(survey: Survey, forecast: Forecast, gpu_hour_price: float | None) -> None:
    """Print survey and forecast to stdout."""
    print(f"records     {_records(survey)}")
    print(f"sample      {_counted(survey.sampled)}: {_lengths(survey)}")
    if survey.model is not None:
        print(f"model       {survey.model}")
    if survey.precision is not None:
        print(f"precision   {survey.precision.dtype}: {survey.precision.detail}")
    for left_out in survey.left_out:
        print(f"left out    {left_out}")
    _print_examples(survey)
    if survey.repeats is not None:
        print_repeats(survey.repeats, survey.order)
    if forecast.seconds is None:
        print("time        unknown: the length of the input is not known")
    else:
        model = _time(forecast.engine_s)
        print(f"time        {_time(forecast.seconds)} without loading the model, {model} of it inference")
        if gpu_hour_price is not None:
            print(f"cost        {forecast.seconds / 3600 * gpu_hour_price:,.2f} at {gpu_hour_price:g} an hour")
    if (memory := forecast.memory) is not None:
        share = f"{memory.peak / memory.limit.bytes:.0%} of {memory.limit.source}"
        print(f"memory      {_size(memory.peak)} at most, {share}{_room(memory.room)}")
    if forecast.bytes is not None:
        free = "" if forecast.free is None else f", {_size(forecast.free)} free"
        print(f"disk        {_size(forecast.bytes)} while it runs{free}")


def _print_examples(survey: Survey) -> None:
    if survey.form is not None:
        print("form        " + (survey.form.replace("\n", "\n  ") or "not said in the prompt: --no-schema-in-prompt"))
    for example in survey.examples:
        print(f"  as the model sees it: {_short(example)}")


def as_figures(survey: Survey, forecast: Forecast, gpu_hour_price: float | None) -> dict[str, object]:
    """Survey and forecast for a script: what `print_forecast` prints, in records, seconds and bytes."""
    repeats, memory = survey.repeats, forecast.memory
    seconds = forecast.seconds
    figures: dict[str, object] = {
        "records": survey.records,
        "counted": survey.counted,
        "sampled": survey.sampled,
        "unusable": survey.failed,
        "length": {name: survey.quantile(share) for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0))},
        "truncated": survey.truncated,
        "split": survey.split,
        "model": survey.model,
        "dtype": None if survey.precision is None else survey.precision.dtype,
        "left_out": list(map(str, survey.left_out)),
        "form": survey.form,
        "examples": [_short(example) for example in survey.examples],
        "seconds": seconds,
        "inference_s": forecast.engine_s,
        "memory": None if memory is None else {"peak": memory.peak, "limit": memory.limit.bytes, "room": memory.room},
        "disk": None if forecast.bytes is None else {"bytes": forecast.bytes, "free": forecast.free},
    }
    if gpu_hour_price is not None:
        figures["cost"] = None if seconds is None else seconds / 3600 * gpu_hour_price
    if repeats is not None:
        figures["prompts"] = asdict(repeats)
        figures["order"] = None if survey.order is None else survey.order.order
    return figures


def print_repeats(found: Repeats, plan: OrderPlan | None) -> None:
    """Print what the prompts repeat, and what would let more of them be read from a cache."""
    kinds = f"{found.duplicates:.0%} in equal prompts, {found.beginnings:.0%} in common beginnings"
    print(f"prompts     {found.repeated:.0%} of the text of the first {found.prompts:,} repeats: {kinds}")
    if plan is not None and plan.order == "input":
        print(f"order       as in the input: {plan.reason}")
    elif found.gains or (plan is not None and plan.order == "prefix"):
        print(f"order       by prompt: as in the input, neighbours have {found.as_read:.0%} in common")
    else:
        print("order       as in the input: another order would save nothing")
    if found.columns:
        print(f"columns     {', '.join(f'{name} {share:.0%} repeated' for name, share in found.columns.items())}")
    if found.template is not None:
        print(f"template    {found.better:.0%} would repeat with this order of fields:")
        print(f"  --prompt-template {shlex.quote(found.template)}")


def _room(room: float | None) -> str:
    if room is None or room >= _ENOUGH_ROOM:
        return ""
    times = f"{room:,.1f}" if room < 10 else f"{room:,.0f}"
    return f"; room for batches {times} times as large"


def _records(survey: Survey) -> str:
    if survey.records is None:
        return "an unknown number of records"
    return f"{'' if survey.counted else 'about '}{_counted(survey.records)}"


def _counted(records: int) -> str:
    return f"{records:,} record{'s' * (records != 1)}"


def _lengths(survey: Survey) -> str:
    parts = [f"{survey.failed / survey.sampled:.1%} cannot be used"] if survey.failed else []
    if survey.work:
        middle, high, most = (survey.quantile(fraction) for fraction in (0.5, 0.99, 1.0))
        parts.append(f"median length {middle:,}, p99 {high:,}, max {most:,}")
    if survey.truncated:
        parts.append(f"{survey.truncated / survey.sampled:.1%} too long and cut")
    if survey.split:
        parts.append(f"{survey.split / survey.sampled:.1%} too long and split, into {survey.chunks:,} chunks")
    return ", ".join(parts)


def _short(example: object) -> str:
    text = example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _time(seconds: float | None) -> str:
    seconds = seconds or 0.0
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
