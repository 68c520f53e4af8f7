"""Print a report: a table on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from headrace.events import OrderChosen, PrefixCacheUsed
from headrace.observe.accounting.device_limit import DeviceFigures
from headrace.wording import spelled

if TYPE_CHECKING:
    from headrace.observe.reporting.report import Report, WorkerRow

_PARTS_NAMED = 3
_MEMORY_ENOUGH = 0.9
_MEMORY_LITTLE = 0.6
"""Of the limit: with more a job is close to being killed."""
_ORDERS = {"sorted": "by prompt, sorted on disk", "prefix": "by prompt", "input": "as in the input"}
_STAGES = ("load", "prepare", "starved", "inference", "finish", "write")


def print_report(report: Report, stream: TextIO) -> None:
    """Write `report` to `stream`, with rich if it is a terminal and rich is installed; nothing to a quiet one."""
    if getattr(stream, "quiet", False):
        return
    if getattr(stream, "as_json", False):
        said: Any = stream  # it writes objects
        said.emit("info", _title(report), report=dict(rows(report)), advice=spelled(report.advice))
        return
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            console = Console(file=stream)
            table = Table("", "", title=_title(report), show_header=False, title_justify="left")
            for name, value in rows(report):
                table.add_row(name, value)
            console.print(table)
            console.print(spelled(report.advice), highlight=False)
            return
    stream.write(as_text(report))


def as_text(report: Report) -> str:
    """The report as aligned lines, the advice last."""
    lines = rows(report)
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        [_title(report), *(f"  {name:<{width}}  {value}" for name, value in lines), spelled(report.advice), ""]
    )


def rows(report: Report) -> list[tuple[str, str]]:
    """Label and value of each line, in order; empty lines are left out."""
    lines = [("records", _records(report))]
    if report.failures:
        lines.append(("failed because", ", ".join(f"{name} {count:,}" for name, count in report.failures.items())))
    lines += [("left out of input", str(left_out)) for left_out in report.left_out]
    if report.damaged:
        lines.append(("recomputed", _damaged(report)))
    lines += _too_long(report)
    if report.empty:
        lines.append(("empty", f"{report.empty:,} records with an empty text; ``on_empty=error`` fails them"))
    if report.nulled:
        lines.append(("written as null", f"{report.nulled:,} numbers that are NaN or infinite"))
    lines += savings_rows(report.order, report.duplicates, report.prefix_cache)
    lines.append(("wall", f"{_seconds(report.wall_s)}   {report.records_per_s:,.1f} records/s"))
    if report.tokens:
        lines.append(("tokens", f"{report.tokens:,}   {report.tokens_per_s:,.0f} tokens/s"))
    lines += _tuning(report)
    if report.batches:
        lines.append(("engine busy", f"{report.busy:.1%}"))
        lines += device_rows(report.device)
        lines += _batches(report)
    if report.splits:
        lines.append(("run again in halves", f"{report.splits:,} batches"))
    lines += [(f"worker {lane.worker}", _lane(lane)) for lane in report.lanes]
    for stage in _STAGES:
        seconds: float = getattr(report.times, stage)
        share = f"{seconds / report.wall_s:7.1%} of wall" if report.wall_s > 0 else ""
        lines.append((f"time: {stage}", f"{_seconds(seconds)} {share}".rstrip()))
    return [(label, spelled(value)) for label, value in lines]


def _of(records: int) -> str:
    return f", {records:,} records" if records else ""


def _tuning(report: Report) -> list[tuple[str, str]]:
    lines = [] if report.model is None else [("model", report.model)]
    if (chosen := report.precision) is not None:
        lines.append(("precision", f"{chosen.dtype}: {chosen.detail}"))
    if report.budget is not None:
        lines.append(("batch budget", f"{report.budget:,.0f} tokens, found while the job ran"))
    if (memory := report.memory) is not None:
        share = memory.peak / memory.limit
        warning = "; set a smaller ``batch_tokens`` or ``buffer_memory``" if share > _MEMORY_ENOUGH else ""
        if share < _MEMORY_LITTLE and memory.larger_pay is not None:
            larger = f"a ``batch_tokens`` above {report.budget or 0:,.0f} may be faster"
            warning = f"; {larger if memory.larger_pay else 'larger batches were no faster'}"
        lines.append(("memory", f"{memory.peak / 1e9:.1f} GB at most, {share:.0%} of {memory.source}{warning}"))
    return lines


def savings_rows(order: Sequence[OrderChosen], duplicates: int, cache: PrefixCacheUsed | None) -> list[tuple[str, str]]:
    """What the order of work, equal records and a cache of prefixes have saved, as labels and values."""
    lines = [("order of work", f"{_ORDERS[chosen.order]}{_of(chosen.records)}: {chosen.reason}") for chosen in order]
    if duplicates:
        lines.append(("duplicates", f"{duplicates:,} records with the answer of an equal one"))
    if cache is not None and cache.queries:
        cached = f"{cache.hits:,} from the prefix cache ({cache.hits / cache.queries:.1%})"
        lines.append(("prompt tokens", f"{cache.queries:,}   {cache.computed:,} computed, {cached}"))
    return lines


def device_rows(device: DeviceFigures | None) -> list[tuple[str, str]]:
    """What the device did, as labels and values."""
    if device is None:
        return []
    computed = f"{device.computed:.1%} of wall in forward passes"
    lines = [("device computed", computed + (f"; limited by {device.limit}" if device.limit else ""))]
    if device.operations_per_record:
        work = f"{_flops(device.operations_per_record)} per record, {_flops(device.operations_per_s)}/s"
        mfu = "" if device.mfu is None else f", {device.mfu:.0%} of the measured {device.dtype} peak (MFU)"
        lines.append(("arithmetic", work + mfu))
    if device.replayed or device.no_graphs:
        share = f"{device.replayed:.0%} of the batches were replays of captured ones" if device.replayed else ""
        lines.append(("CUDA graphs", "; ".join(filter(None, (share, device.no_graphs)))))
    if device.watts is not None:
        clock = "" if device.clock_mhz is None else f", {device.clock_mhz:,.0f} MHz at the end"
        lines.append(("power", f"{device.watts:,.0f} W, {device.joules_per_record or 0:.3g} J per record{clock}"))
    return lines


def _flops(operations: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if operations >= factor:
            return f"{operations / factor:,.1f} {unit}FLOP"
    return f"{operations / 1e6:,.1f} MFLOP"


def _damaged(report: Report) -> str:
    records = sum(part.records for part in report.damaged)
    parts = "; ".join(f"{part.path} ({part.reason})" for part in report.damaged[:_PARTS_NAMED])
    more = f" and {len(report.damaged) - _PARTS_NAMED:,} more" if len(report.damaged) > _PARTS_NAMED else ""
    return f"{records:,} records of damaged parts: {parts}{more}"


def _lane(lane: WorkerRow) -> str:
    parts = [f"{lane.records:,} records", f"{lane.batches:,} batches", f"busy {lane.busy:.1%}"]
    if lane.failed:
        parts.insert(1, f"{lane.failed:,} failed")
    if lane.lost:
        parts.append(f"died {lane.lost} ×")
    return ", ".join(parts)


def _batches(report: Report) -> list[tuple[str, str]]:
    size = f"{report.batches:,} of {report.mean_batch_size:.1f} records"
    if not report.close_reasons:  # an engine that runs in steps neither pads nor closes batches
        return [("steps", size)]
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.close_reasons.items())
    padding = ("padding efficiency", f"{report.padding_efficiency:.1%}")
    return [padding, ("batches", f"{size}   closed by: {reasons}")]


def _title(report: Report) -> str:
    return f"headrace run: {report.state}"


def _too_long(report: Report) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if report.truncated:
        lines.append(("truncated", f"{report.truncated:,} records cut to the model's maximum length"))
    if report.split:
        lines.append(("split", f"{report.split:,} records longer than the model's maximum: {report.chunks:,} chunks"))
    return lines


def _records(report: Report) -> str:
    parts = [f"{report.ok:,} ok", f"{report.failed:,} failed"]
    if report.skipped:
        lost = f" ({report.skipped_failed:,} of them failed)" if report.skipped_failed else ""
        parts.append(f"{report.skipped:,} done before{lost}")
    return ", ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:8.2f} s"
