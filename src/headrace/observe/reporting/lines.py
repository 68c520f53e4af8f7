"""The lines of a report that need more than a phrase, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from headrace.observe.reporting.figure import Line

if TYPE_CHECKING:
    from headrace.observe.accounting.device_limit import DeviceFigures
    from headrace.observe.reporting.run_facts import WorkerRow
    from headrace.observe.reporting.run_figures import Report

T = TypeVar("T", bound=str)


_PARTS_NAMED = 3
_MEMORY_ENOUGH = 0.9
"""A fraction of the limit: a job that holds more is close to being killed."""
_MEMORY_LITTLE = 0.6
_ORDERS = {"sorted": "by prompt, sorted on disk", "prefix": "by prompt", "input": "as in the input"}
_STAGES = ("load", "prepare", "starved", "inference", "finish", "write")

DEVICE = dict.fromkeys(
    ("device computed", "arithmetic", "GPU counters", "CUDA graphs", "power"),
    "see [what the device itself measured](#what-the-device-itself-measured)",
)
BATCHES = {
    "batches": "how many, and their mean size",
    "steps": "the same for a language model that works in steps, which has no batches",
    "closed by": "what ended the batches, and how many of them; the reasons are:",
    "full_cost": "the next record would have exceeded the largest cost of a batch (``batch_tokens``)",
    "full_size": "the batch had ``batch_size`` records",
    "boundary": "the length of the next record differed too much",
    "timeout": "the oldest record had waited for `batch_delay_s`",
    "idle": "waiting would not have added records",
    "drain": "no more records were coming: the input had ended",
}
TIMES = {
    "time: load": "reading the input. All `time:` lines are seconds of work, summed over threads; stages overlap",
    "time: prepare": "preparing records (``prepare``, tokenizing)",
    "time: starved": "the engine was free and had nothing to do",
    "time: inference": "at least one batch was in the engine",
    "time: finish": "finishing results (``finish``)",
    "time: write": "writing parts",
}


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:8.2f} s"


def count(number: int, what: str, several: str = "") -> str:
    """A number of things, such as "1 record" or "2,000 records"; `several` is a plural that is not formed with "s"."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def counted(counts: Mapping[T, int]) -> str:
    """Counts by name."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def records(report: Report) -> str:
    """Records by what became of them."""
    parts = [f"{report.ok:,} ok", f"{report.failed:,} failed"]
    if report.skipped:
        lost = f" ({report.skipped_failed:,} of them failed)" if report.skipped_failed else ""
        parts.append(f"{report.skipped:,} done before{lost}")
    return ", ".join(parts)


def damaged(report: Report) -> str:
    """The damaged parts."""
    parts = "; ".join(f"{part.path} ({part.reason})" for part in report.damaged[:_PARTS_NAMED])
    more = f" and {len(report.damaged) - _PARTS_NAMED:,} more" if len(report.damaged) > _PARTS_NAMED else ""
    return f"{count(sum(part.records for part in report.damaged), 'record')} of damaged parts: {parts}{more}"


def split(report: Report) -> str:
    """Records that were computed in chunks."""
    return f"{count(report.split, 'record')} longer than the model's maximum: {count(report.chunks, 'chunk')}"


def order(report: Report) -> list[Line]:
    """The orders of work."""
    return [
        (
            "order of work",
            ", ".join([_ORDERS[one.order], *([count(one.records, "record")] if one.records else [])])
            + f": {one.reason}",
        )
        for one in report.order
    ]


def prompt_tokens(report: Report) -> str:
    """How many prompt tokens were computed."""
    cache = report.prefix_cache
    if cache is None or not cache.queries:
        return ""
    cached = f"{cache.hits:,} from the prefix cache ({cache.hits / cache.queries:.1%})"
    return f"{cache.queries:,}   {cache.computed:,} computed, {cached}"


def memory(report: Report) -> str:
    """The most memory, and a warning if it was nearly all, or little of it."""
    used = report.memory
    if used is None:
        return ""
    share = used.peak / used.limit
    warning = "; set a smaller ``batch_tokens`` or ``buffer_memory``" if share > _MEMORY_ENOUGH else ""
    if share < _MEMORY_LITTLE and used.larger_pay is not None:
        larger = f"a ``batch_tokens`` above {report.budget or 0:,.0f} may be faster"
        warning = f"; {larger if used.larger_pay else 'larger batches were no faster'}"
    return f"{used.peak / 1e9:.1f} GB at most, {share:.0%} of {used.source}{warning}"


def device(found: DeviceFigures) -> list[Line]:
    computed = f"{found.computed:.1%} of wall in forward passes"
    lines = [("device computed", computed + (f"; limited by {found.limit}" if found.limit else ""))]
    if found.operations_per_record:
        work = f"{_flops(found.operations_per_record)} per record, {_flops(found.operations_per_s)}/s"
        mfu = "" if found.mfu is None else f", {found.mfu:.0%} of the measured {found.dtype} peak (MFU)"
        lines.append(("arithmetic", work + mfu))
    if found.kernels is not None:
        parts = f"tensor cores {found.tensor_cores or 0:.0%}, memory {found.memory_bus or 0:.0%}"
        lines.append(("GPU counters", f"kernels ran {found.kernels:.0%} of wall; {parts}"))
    if found.replayed or found.no_graphs:
        share = f"{found.replayed:.0%} of the batches were replays of captured ones" if found.replayed else ""
        lines.append(("CUDA graphs", "; ".join(filter(None, (share, found.no_graphs)))))
    if found.watts is not None:
        clock = "" if found.clock_mhz is None else f", {found.clock_mhz:,.0f} MHz at the end"
        most = "" if found.power_limit_w is None else f" of {found.power_limit_w:,.0f} W allowed"
        lines.append(("power", f"{found.watts:,.0f} W{most}, {found.joules_per_record or 0:.3g} J per record{clock}"))
    return lines


def batches(report: Report) -> list[Line]:
    """Batches and what closed them; steps, of an engine that has no batches."""
    size = f"{report.batches:,} of {report.mean_batch_size:.1f} records"
    if not report.close_reasons:
        return [("steps", size)]
    return [("batches", f"{size}   closed by: {counted(report.close_reasons)}")]


def worker(lane: WorkerRow) -> Line:
    parts = [count(lane.records, "record"), count(lane.batches, "batch", "batches"), f"busy {lane.busy:.1%}"]
    if lane.failed:
        parts.insert(1, f"{lane.failed:,} failed")
    if lane.lost:
        parts.append(f"died {lane.lost} ×")
    return f"worker {lane.worker}", ", ".join(parts)


def times(report: Report) -> list[Line]:
    """Seconds of work by stage."""
    found = []
    for stage in _STAGES:
        spent: float = getattr(report.times, stage)
        share = f"{spent / report.wall_s:7.1%} of wall" if report.wall_s > 0 else ""
        if stage == "prepare" and report.host.preparers:
            share += f", in {count(report.host.preparers, 'process', 'processes')}"
        found.append((f"time: {stage}", f"{seconds(spent)} {share}".rstrip()))
    return found


def _flops(operations: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if operations >= factor:
            return f"{operations / factor:,.1f} {unit}FLOP"
    return f"{operations / 1e6:,.1f} MFLOP"
