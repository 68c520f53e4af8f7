"""Draw the picture of the README: a sequential loop and Headrace with the same work, from a real run of both.

python -m benchmarks.timeline
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from benchmarks import saturation
from benchmarks.common import report
from headrace import DynamicBatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

CHUNKS = 30
IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "timeline.svg"
LANES = {"load": "#7a9cc6", "model": "#2b8a5f", "write": "#c99a5b"}
INK = "#24292f"


@dataclass
class Trace:
    """When each stage worked, in seconds from the beginning."""

    began: float = field(default_factory=time.perf_counter)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {lane: [] for lane in LANES})

    @contextmanager
    def stage(self, lane: str) -> Iterator[None]:
        """Note how long the body takes."""
        started = time.perf_counter()
        yield
        self.spans[lane].append((started - self.began, time.perf_counter() - self.began))

    @property
    def wall_s(self) -> float:
        """From the beginning to the end of the last stage."""
        return max(end for spans in self.spans.values() for _, end in spans)

    @property
    def busy(self) -> float:
        """The share of the wall time in which the model worked."""
        return sum(end - start for start, end in self.spans["model"]) / self.wall_s


class TracedEngine(saturation.Engine):
    """The engine of the busy-fraction benchmark, with its batches noted."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(seconds_per_record=2 * saturation.UNIT_S / saturation.CHUNK)
        self._trace = trace

    def __call__(self, batch: Sequence[int]) -> list[int]:
        with self._trace.stage("model"):
            return super().__call__(batch)


def traced(trace: Trace) -> None:
    """Let the loads and writes of the benchmark note their times too."""

    def load(chunk: int, plain: object = saturation.load) -> list[int]:
        with trace.stage("load"):
            return plain(chunk)  # type: ignore[operator, no-any-return]

    def write(results: Sequence[int], plain: object = saturation.write) -> None:
        with trace.stage("write"):
            plain(results)  # type: ignore[operator]

    saturation.load, saturation.write = load, write


def rows_of(spans: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The spans in as few rows as none overlaps in."""
    rows: list[list[tuple[float, float]]] = []
    for span in sorted(spans):
        row = next((row for row in rows if row[-1][1] <= span[0]), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def draw(axes: Axes, title: str, trace: Trace) -> None:
    """One panel: a lane for each stage, a box for each time it worked."""
    for number, (lane, colour) in enumerate(LANES.items()):
        rows = rows_of(trace.spans[lane])
        height = 0.8 / len(rows)
        for index, row in enumerate(rows):
            boxes = [(start, end - start) for start, end in row]
            bottom = 2 - number + 0.1 + index * height
            axes.broken_barh(boxes, (bottom, height * 0.92), facecolor=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks([2.5, 1.5, 0.5], list(LANES), color=INK)
    axes.set_ylim(0, 3)
    axes.set_title(
        f"{title}: {trace.wall_s:.2f} s, model busy {trace.busy:.0%} of the time", loc="left", fontsize=10, color=INK
    )
    axes.tick_params(length=0, colors=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.axvline(trace.wall_s, color=INK, linewidth=0.8, linestyle=":")


def main() -> None:
    """Run both, draw them one above the other, and print what was drawn."""
    plain = saturation.load, saturation.write
    saturation.CHUNKS = CHUNKS
    traces = {}
    for title in ("A sequential loop", "Headrace"):
        saturation.load, saturation.write = plain
        trace = traces[title] = Trace()
        traced(trace)
        engine = TracedEngine(trace)
        if title == "Headrace":
            saturation.with_batcher(lambda e: DynamicBatcher(e, max_batch_size=saturation.CHUNK), engine)
        else:
            saturation.sequential(engine)
    # Fonts stay text, and equal runs make equal files.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.family": "sans-serif"})
    figure, panels = plt.subplots(2, 1, figsize=(8.6, 3.4), sharex=True, layout="constrained", facecolor="white")
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        draw(axes, title, trace)
    panels[1].set_xlabel("seconds", fontsize=9, color=INK)
    IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(IMAGE, metadata={"Date": None})
    report(
        "timeline",
        f"{CHUNKS} chunks of {saturation.CHUNK} records: load 30 ms, model 20 ms, write 10 ms",
        ["variant", "wall s", "busy"],
        [[title, trace.wall_s, trace.busy] for title, trace in traces.items()],
    )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main()
