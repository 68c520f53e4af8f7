"""Draws a frame of `headrace top` with rich."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.observe.accounting.timeline import CAUSES, COLOURS, LABELS, LANES
from headrace.observe.live.frame import Frame, clock_text

_BAR = 32
_STALE_S = 5.0
_MOST_ROWS = 16
_FIRST = ("records", "tokens", "requests", "failed")


def render_frame(frame: Frame, now: float) -> RenderableType:
    """The frame as it looks at `now`, in seconds since 1970."""
    parts: list[RenderableType] = [_head(frame, now)]
    if frame.fraction is not None and frame.kind == "job":
        parts.append(_progress(frame))
    parts += [_numbers(frame), Text(), _lanes(frame), Text(), _causes(frame), Text()]
    parts += [
        _line(label, values)
        for label, values in (("waiting", frame.queue), ("errors", frame.errors))
        if any(values.values())
    ]
    if frame.replicas:
        parts.append(_replicas(frame))
    if frame.advice:
        parts += [Text(), Text(plain(frame.advice), style="italic")]
    return Group(*parts)


def plain(text: str) -> str:
    """Text that cannot control the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _head(frame: Frame, now: float) -> Text:
    colour = "green" if frame.state.startswith(("running", "ready", "finished")) else "yellow"
    head = Text.assemble(
        (plain(frame.name), "bold"), "  ", (plain(frame.state), colour), f"  up {clock_text(frame.up_s)}"
    )
    age = now - frame.at
    if age > _STALE_S and frame.state.startswith(("running", "ready", "no answer")):
        head.append(f"  as of {clock_text(age)} ago", "yellow")
    elif not frame.state.startswith(("running", "ready")):
        head.append(time.strftime("  at %Y-%m-%d %H:%M:%S", time.localtime(min(frame.at, 4e9))), "dim")
    return head


def _progress(frame: Frame) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    left = "" if frame.eta_s is None else f"{clock_text(frame.eta_s)} to go"
    row.add_row(ProgressBar(1.0, frame.fraction or 0.0, width=_BAR), f"{frame.fraction or 0.0:.0%}", left)
    return row


def _numbers(frame: Frame) -> Text:
    rates = [f"{frame.rates[name]:,.1f} {name}/s" for name in _FIRST if name in frame.rates]
    counts = [f"{count:,.0f} {plain(name)}" for name, count in frame.counts.items() if count]
    return Text.assemble((", ".join(rates) or "measuring", "bold"), "   ", (", ".join(counts), "dim"))


def _lanes(frame: Frame) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("lane", "dim"), Text("at work on average", "dim"), "")
    most = max([1.0, *frame.lanes.values()])
    for lane, at_work in frame.lanes.items():
        colour = COLOURS[LANES.get(lane, "write")]
        bar = ProgressBar(most, at_work, width=_BAR, complete_style=colour, finished_style=colour)
        table.add_row(plain(lane), bar, Text(f"{at_work:.2f}", justify="right"))
    return table


def _causes(frame: Frame) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("device", "dim"), Text(f"last {frame.window_s:.0f} s", "dim"), "", Text("since the start", "dim")
    )
    shown = [cause for cause in CAUSES if frame.causes.get(cause, 0) >= 0.0005 or frame.causes_of_all.get(cause, 0)]
    for cause in shown:
        share, colour = frame.causes.get(cause, 0.0), COLOURS[cause]
        table.add_row(
            LABELS[cause],
            ProgressBar(1.0, share, width=_BAR, complete_style=colour, finished_style=colour),
            Text(f"{share:6.1%}", justify="right"),
            Text(f"{frame.causes_of_all.get(cause, 0.0):6.1%}", justify="right"),
        )
    return table


def _line(label: str, values: Mapping[str, float]) -> Text:
    sign = " × " if label == "errors" else " "  # an error may begin with a number: its status
    parts = [f"{value:,.0f}{sign}{plain(name)}" for name, value in list(values.items())[:_MOST_ROWS] if value]
    return Text.assemble((f"{label}  ", "dim"), ", ".join(parts))


def _replicas(frame: Frame) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("model" if frame.kind == "server" else "worker", "state", "records", "busy", "died"):
        table.add_column(name, justify="left" if name in ("model", "worker", "state") else "right")
    for row in frame.replicas[:_MOST_ROWS]:
        busy = "-" if row.busy is None else f"{row.busy:.0%}"
        table.add_row(Text(plain(row.name)), Text(plain(row.state)), f"{row.records:,}", busy, str(row.lost or ""))
    if len(frame.replicas) > _MOST_ROWS:
        table.add_row(f"and {len(frame.replicas) - _MOST_ROWS:,} more")
    return table
