"""What it costs to keep account of a job's time: a no-op job with the accountant and the recorder, and without.

python -m benchmarks.observing
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import headrace
from benchmarks.common import quick, ratio, report, rounds
from benchmarks.jobs import write_input
from benchmarks.jobs_runs import lengths
from headrace.app.jobs import job
from headrace.jobs.pipeline import read
from headrace.jobs.pipeline.dedupe import RepeatCounter
from headrace.observe.live.recorder import Recorder
from headrace.observe.reporting.report import ReportBuilder

RECORDS = 20_000 if quick() else 300_000
ROUNDS = 2 if quick() else 7
SIZES = (256, 1024)


class _NoReport(ReportBuilder):
    def __call__(self, event: object) -> None:
        pass


class _NoRepeats(RepeatCounter):
    most = 0


class _NoRecorder:
    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, event: object) -> None:
        pass


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Jobs keep no account, and make no report."""
    with (
        mock.patch.object(job, "ReportBuilder", _NoReport),
        mock.patch.object(job, "Recorder", _NoRecorder),
        mock.patch.object(read, "RepeatCounter", _NoRepeats),
    ):
        yield


class _Stopwatch:
    """CPU seconds in some methods, its own included: a bound from above that other work hardly blurs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: type, name: str) -> Any:
        """A patch that measures a method, on whichever thread."""
        method = getattr(owner, name)

        def measured(*arguments: object) -> object:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - started

        return mock.patch.object(owner, name, measured)

    def share_of(self, run: Callable[[], float]) -> float:
        """These methods' share of a run's CPU seconds."""
        whole = run()
        return self.seconds / whole


def main() -> None:
    """CPU time, for other work on the machine disturbs it less than it disturbs the clock on the wall."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        write_input(source, RECORDS)

        def seconds(size: int) -> float:
            started = time.process_time()
            headrace.run(
                source, sink=Path(folder, "out.jsonl"), task="custom", engine=lengths, batch_size=size, overwrite=True,
                progress=False,
            )  # fmt: skip
            return time.process_time() - started

        for size in SIZES:

            def bare(size: int = size) -> float:
                with unobserved():
                    return seconds(size)

            watch = _Stopwatch()
            with (
                watch.around(ReportBuilder, "__call__"),
                watch.around(RepeatCounter, "look"),
                watch.around(Recorder, "_write"),
                watch.around(Recorder, "_show"),
                watch.around(ReportBuilder, "snapshot"),
            ):
                direct = 100 * watch.share_of(lambda size=size: seconds(size))  # type: ignore[misc]

            figures = rounds(ROUNDS, {"with": lambda size=size: seconds(size), "without": bare})  # type: ignore[misc]
            each = {name: statistics.median(values) for name, values in figures.items()}
            costs = 100 * (ratio(figures["with"], figures["without"]) - 1)
            per_s = RECORDS / each["without"]
            rows.append(
                [
                    f"batches of {size}",
                    round(per_s),
                    each["with"],
                    each["without"],
                    f"{costs:+.1f} %",
                    f"{direct:.1f} %",
                ]
            )
    report(
        "observing",
        "The cost of keeping account of a job's time",
        ["no-op job", "records per CPU second", "with, CPU s", "without, CPU s", "cost", "measured inside"],
        rows,
        [
            f"{RECORDS:,} records, JSONL to JSONL; {ROUNDS} rounds in turn; the cost is the median of the pairs.",
            "Measured inside: CPU time of report, account, writes and comparing records, over that of the job.",
        ],
    )


if __name__ == "__main__":
    main()
