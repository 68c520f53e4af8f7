"""The report page of a million batches in Chromium, and whether all figures of how busy a device was agree.

python -m benchmarks.page
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

from tests.acceptance.browser import Browser

import headrace
from benchmarks.common import quick, report
from headrace.events import BatchDone, BatchFormed, JobDone, JobStarted, StageDone
from headrace.observe.page.render import ReportedJob, write_page
from headrace.observe.reporting import summary
from headrace.observe.reporting.report import ReportBuilder
from headrace.observe.reporting.summary import RunSummary

BATCHES = 20_000 if quick() else 1_000_000
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
LOADS = 5


def long_run() -> RunSummary:
    """The summary of a job of a million batches, from as many events as a real one tells."""
    made, builder, at = random.Random(1), ReportBuilder(0.0), 1.0
    builder(JobStarted(None, BATCHES * 32, 0, at))
    for number in range(BATCHES):
        size, took, idle = made.randint(1, 64), 0.01 + 0.02 * made.random(), 0.004 * made.random()
        builder(StageDone("load", size, 0.001, at))
        builder(StageDone("prepare", size, 0.01, at, tokens=size * 30))
        builder(BatchFormed(number, size, size * 30, size * 36, "full_size", idle, at + idle))
        at += idle + took
        builder(BatchDone(number, size, 0, size * 30, size * 36, took, at))
        builder(StageDone("finish", size, 0.001, at))
    builder(JobDone("finished", at))
    found = builder.build(at)
    return summary.summarize(found, "finished", 0.0, {"model": "m"}, {"headrace": "1"})


def page_rows(folder: Path) -> list[list[object]]:
    """Size and times of the page."""
    run = long_run()
    page = folder / "page.html"
    started = time.perf_counter()
    write_page(page, [ReportedJob("out.parquet", "finished", [run])], 2.5)
    drawn_s = time.perf_counter() - started
    painted, complete = [], []
    for number in range(LOADS):
        with Browser(folder / f"profile-{number}") as browser:
            browser.open(page.as_uri())
            painted.append(browser.until(PAINTED))
            browser.until("document.body?.dataset.drawn")
            complete.append(browser.evaluate("performance.now()"))
    return [
        ["size of the page", f"{page.stat().st_size / 1e6:.2f} MB", "< 3 MB"],
        ["writing it", f"{drawn_s:.2f} s", ""],
        ["first paint in headless Chromium, the slowest of five", f"{max(painted) / 1000:.2f} s", "< 2 s"],
        ["all charts drawn, the slowest of five", f"{max(complete) / 1000:.2f} s", ""],
    ]


def covered_s(trace: Path) -> float:
    """The time that the batches of a trace cover."""
    covered = until = 0.0
    for box in sorted(json.loads(trace.read_text()), key=lambda box: box.get("ts", 0.0)):
        if box["name"] == "batch":
            end = box["ts"] + box["dur"]
            covered += max(end - max(box["ts"], until), 0.0)
            until = max(until, end)
    return covered / 1e6


def busy_rows(folder: Path) -> list[list[object]]:
    """How busy MiniLM was, by three ways to measure it, in one run."""
    made = random.Random(1)
    texts = [f"{number} " + "word " * made.randint(1, 60) for number in range(100 if quick() else 1_500)]
    trace = folder / "trace.json"
    found = headrace.run(
        texts, sink=folder / "v.parquet", task="embed", dtype="float32", trace=str(trace), progress=False
    )
    assert found.device is not None
    figures = {
        "batcher": found.busy,
        "trace": covered_s(trace) / found.wall_s,
        "device monitor (forward passes)": found.device.computed,
    }
    spread = 100 * (max(figures.values()) - min(figures.values()))
    rows: list[list[object]] = [[f"busy, {name}", f"{100 * busy:.2f} %", ""] for name, busy in figures.items()]
    return [*rows, ["largest difference", f"{spread:.2f} points", "2 points"]]


def main() -> None:
    """Measure both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*busy_rows(folder), *page_rows(folder)]
    report(
        None if quick() else "page",
        "Busy figures of one run, and the page of a million batches",
        ["figure", "measured", "at most"],
        rows,
        [f"MiniLM on 1,500 texts; a page of {BATCHES:,} batches."],
    )


if __name__ == "__main__":
    main()
