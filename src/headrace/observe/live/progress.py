"""A job's progress while it runs: a bar on a terminal or in a notebook, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from headrace.events import Event, InputLeftOut, JobDone, JobStarted, PrecisionChosen, RunDescribed
from headrace.observe.live.frame import clock_text
from headrace.observe.live.meter import Meter, Snapshot
from headrace.observe.reporting.lines import count

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.1
_HTML_EVERY_S = 0.5


class Progress:
    """A context manager and thread-safe event listener that writes to stderr, or to another stream.

    A job that is already finished shows nothing.
    `clock` must be the clock of the events: `time.monotonic` outside of tests.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meter = Meter()
        self._lock = threading.Lock()
        self._display: _Display = (in_notebook() if stream is None else None) or _bar_or_lines(stream or sys.stderr)
        self._shown_at: float | None = None
        self._open = False

    def __enter__(self) -> Self:
        self._shown_at = self._clock()
        return self

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._meter.add(event)
            now = self._clock()
            if self._shown_at is None or isinstance(
                event, RunDescribed | JobStarted | JobDone | PrecisionChosen | InputLeftOut
            ):
                return
            if not self._open:
                self._open = True
                self._display.open()
            if now - self._shown_at >= self._display.every_s:
                self._display.show(self._meter.snapshot(now))
                self._shown_at = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._open:
                self._display.show(self._meter.snapshot(self._clock()))
                self._display.close()
            self._shown_at = None  # a late event is counted but no longer shown


class _Display:
    """Shows nothing; the base of displays that do."""

    every_s = 3600.0
    """Minimum seconds between two updates."""

    def open(self) -> None:
        """Begin to show."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the present state."""

    def close(self) -> None:
        """Keep what is shown as it is."""


class _Lines(_Display):
    every_s = _LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: tuple[int, float | None] | None = None

    def show(self, snapshot: Snapshot) -> None:
        done = snapshot.skipped + snapshot.ok + snapshot.failed
        if self._shown == (done, 1.0):  # all of it: another line would say the same
            return
        self._shown = done, snapshot.fraction
        share = "" if snapshot.fraction is None else f" ({snapshot.fraction:.0%})"
        self._stream.write(f"headrace: {count(done, 'record')}{share}, {describe(snapshot)}\n")
        self._stream.flush()


class _Bar(_Display):
    """rich's progress bar, with the job's rates beside it."""

    every_s = _BAR_EVERY_S

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, rates="")

    def open(self) -> None:
        self._bar.start()

    def show(self, snapshot: Snapshot) -> None:
        done = snapshot.skipped + snapshot.ok + snapshot.failed
        self._bar.update(
            self._task,
            description=count(done, "record"),
            total=None if snapshot.fraction is None else 1.0,
            completed=snapshot.fraction or 0.0,
            rates=describe(snapshot),
            refresh=True,
        )

    def close(self) -> None:
        self._bar.stop()


class _Html(_Display):
    """A bar below the cell of a notebook."""

    every_s = _HTML_EVERY_S

    def __init__(self, display: Callable[..., object], html: Callable[[str], object]) -> None:
        self._display = display
        self._html = html
        self._shown: Any = None
        """What updates it."""

    def open(self) -> None:
        self._shown = self._display(self._html("headrace: starting"), display_id=True)

    def show(self, snapshot: Snapshot) -> None:
        done = snapshot.skipped + snapshot.ok + snapshot.failed
        value = "" if snapshot.fraction is None else f' value="{snapshot.fraction:.4f}"'
        share = "" if snapshot.fraction is None else f"{snapshot.fraction:.0%}, "
        bar = f'<progress style="width:20em;vertical-align:middle"{value}></progress>'
        self._shown.update(self._html(f"<div>{bar} {share}{count(done, 'record')}, {escape(describe(snapshot))}</div>"))


def in_notebook() -> _Display | None:
    """The display of the notebook that this process runs; None if it runs none."""
    ipython = sys.modules.get("IPython")  # imported by the notebook itself
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):  # IPython on a terminal has none
        return None
    from IPython.display import HTML, display

    return _Html(display, HTML)


def describe(snapshot: Snapshot) -> str:
    """The rates and the remaining time in one line."""
    parts = [f"{snapshot.records_per_s:,.0f} records/s"]
    if snapshot.tokens_per_s:
        parts.append(f"{snapshot.tokens_per_s:,.0f} tokens/s")
    parts.append(f"busy {snapshot.busy:.0%}" + (f" in {snapshot.dtype}" if snapshot.dtype else ""))
    if snapshot.failed:
        parts.append(f"{snapshot.failed:,} failed")
    if snapshot.eta_s is not None and snapshot.fraction is not None and snapshot.fraction < 1:
        parts.append(f"{clock_text(snapshot.eta_s)} to go")
    return ", ".join(parts)


def _bar_or_lines(stream: TextIO) -> _Display:
    if getattr(stream, "quiet", False):
        return _Display()
    if not stream.isatty():
        return _Lines(stream)
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
    except ModuleNotFoundError:
        return _Lines(stream)

    def text(template: str) -> TextColumn:
        return TextColumn(template, table_column=Column(no_wrap=True))

    columns = (
        text("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # fills the remaining width, from 80 columns on
        text("{task.percentage:>3.0f}%"),
        text("{task.fields[rates]}"),
    )
    # Drawn on events: rich's refresh thread would briefly outlive the job.
    return _Bar(RichProgress(*columns, console=Console(file=stream), auto_refresh=False, expand=True))
