"""The curve of `headrace tune` as a picture."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.app.grid import Grid, GridRow, Setting
from headrace.app.step_grid import StepGrid
from headrace.errors import ConfigError, MissingExtraError
from headrace.io.storage.locations import no_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png")


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn at this path, before anything is measured.

    Raises:
        ConfigError: another format, or no such folder.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {no_folder(path.absolute().parent)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError('--plot needs matplotlib, which is not installed: pip install "headrace[plot]"')


def draw(grid: Grid, path: Path) -> None:
    """Throughput, latency, memory and padding by budget, one line for each setting, and the chosen point.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines: defaultdict[Setting, list[GridRow]] = defaultdict(list)
    for row in grid.rows:
        lines[row.setting].append(row)

    def panels(figure: Figure) -> None:
        axes = figure.subplots(2, 2).flatten()
        for place, (title, value) in enumerate(_PANELS.items()):
            _panel(axes[place], title, value, lines, grid.chosen)
        axes[0].legend(fontsize="small")

    _saved(panels, path, grid.cpu)


def draw_steps(grid: StepGrid, path: Path) -> None:
    """Throughput by the answers in a step, one line for each number of tokens, and the chosen point.

    Raises:
        ConfigError: the file cannot be written.
    """

    def panels(figure: Figure) -> None:
        axis = figure.subplots()
        for tokens in sorted({row.size.tokens for row in grid.rows}):
            points = [(row.size.answers, row.tokens_per_s) for row in grid.rows if row.size.tokens == tokens]
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{tokens:,} tokens a step")
        best = grid.chosen
        axis.plot([best.size.answers], [best.tokens_per_s], marker="*", markersize=16, color="black", linestyle="none")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title("tokens/s", fontsize="medium")
        axis.set_xlabel("answers in a step")
        axis.legend(fontsize="small")

    _saved(panels, path, grid.cpu)


def _saved(panels: Callable[[Figure], None], path: Path, cpu: str) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none"}):  # the same picture for the same figures
        figure = Figure(figsize=(9, 6), layout="constrained")
        panels(figure)
        figure.suptitle(f"measured on {cpu}", fontsize="small")
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"--plot {path}: cannot be written: {error.strerror or error}") from error


_PANELS: Mapping[str, Callable[[GridRow], float | None]] = {
    "tokens/s": lambda row: row.measured.cost_per_s,
    "ms per batch": lambda row: 1000 * row.measured.latency_s,
    "peak memory, MB": lambda row: None if row.measured.memory is None else row.measured.memory / 1e6,
    "padding, %": lambda row: 100 * row.measured.padding,
}


def _panel(
    axis: Any,
    title: str,
    value: Callable[[GridRow], float | None],
    lines: dict[Setting, list[GridRow]],
    chosen: GridRow,
) -> None:
    for setting, rows in lines.items():
        points = [(row.measured.budget, value(row)) for row in rows if value(row) is not None]
        threads = "" if setting.threads is None else f", {setting.threads} threads"
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{setting.engine} {setting.dtype}{threads}")
    if value(chosen) is not None:
        axis.plot([chosen.measured.budget], [value(chosen)], marker="*", markersize=16, color="black", linestyle="none")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize="medium")
    axis.set_xlabel("tokens per batch, padding included")
