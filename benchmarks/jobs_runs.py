"""One job in its own process, for `benchmarks.jobs`: `python -m benchmarks.jobs_runs NAME INPUT OUTPUT`.

Prints one line of JSON: its seconds, its peak memory and when the engine was first called. The engines only count the
characters of a text, so the benchmark measures the way of a record to the engine and back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import headrace
from benchmarks.noop_columns import NoopColumns, Rows
from headrace import DynamicBatcher
from headrace.app.jobs.tables import TableKind

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

BATCH = 1024
PACE_S = 0.1
"""A batch of the paced engine: 10,000 records a second with batches of 1,000."""
VECTORS_A_SECOND = 50_000
_DIES_AT = float(os.environ.get("HEADRACE_BENCH_DIES_AT", "inf"))
_calls = itertools.count()
_first: list[float] = []
_started: list[float] = []
"""When the job began, and the memory then."""


def lengths(batch: list[str]) -> list[int]:
    """The engine of these jobs; where the environment says so it kills its process after so many records."""
    if next(_calls) * BATCH >= _DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    if not _first:
        _first.append(time.perf_counter())
    return [len(text) for text in batch]


def paced(batch: list[str]) -> list[int]:
    """An engine that takes 0.1 s a batch."""
    time.sleep(PACE_S)
    return lengths(batch)


class Vectors(NoopColumns):
    """A device that makes 50,000 vectors of 384 numbers a second."""

    def forward(self, batch: Sequence[str] | Rows) -> NDArray[numpy.float32]:  # type: ignore[override]
        """Random ones."""
        import numpy as np

        time.sleep(len(batch) / VECTORS_A_SECOND)
        if not hasattr(self, "_numbers"):
            self._numbers = np.random.default_rng(0).standard_normal((8192, 384), dtype=np.float32)
        return self._numbers[: len(batch)].copy()


def vectors(source: str, sink: str) -> None:
    """`headrace.run` with that device. A path without a suffix is a folder of parts."""
    to = {"sink": sink} if Path(sink).suffix else {"sink": f"{sink}/", "output_format": "parquet"}
    headrace.run(source, engine="benchmarks.jobs_runs:Vectors", progress=False, **to)  # type: ignore[arg-type]


def job(
    engine: str = "lengths", batch_size: int = BATCH, keep_columns: Sequence[str] = ()
) -> Callable[[str, str], None]:
    """`headrace.run` with one of the engines above."""

    def run(source: str, sink: str) -> None:
        headrace.run(
            source,
            sink=sink,
            task="custom",
            engine=f"benchmarks.jobs_runs:{engine}",
            batch_size=batch_size,
            keep_columns=keep_columns,
            progress=False,
        )

    return run


def to_table(kind: TableKind) -> Callable[[str, str], None]:
    """`headrace.run` from a table of that kind to another; the time to read the table is not counted."""

    def run(source: str, _: str) -> None:
        import pyarrow.json

        table: Any = pyarrow.json.read_json(source)
        if kind == "pandas":
            table = table.to_pandas()
        if kind == "polars":
            import polars

            table = polars.from_arrow(table)
        _restart()
        headrace.run(
            table, sink=kind, task="custom", engine="benchmarks.jobs_runs:lengths", batch_size=BATCH, progress=False
        )

    return run


def _restart() -> None:
    """Measure from now on."""
    _started[:] = [time.perf_counter(), peak_mib()]


def plain_file(source: str, sink: str) -> None:
    """The paced engine through the batcher into a plain file: nothing is kept of how far it came."""

    async def work(out: TextIO) -> None:
        async with DynamicBatcher[dict[str, Any], int](
            lambda rows: paced([row["text"] for row in rows]), max_batch_size=1000, target_batch_cost=1000
        ) as batcher:
            async for row, output in batcher.as_completed(map(json.loads, _lines(source))):
                out.write(json.dumps({"id": row["id"], "output": output}) + "\n")

    with Path(sink).open("w") as out:
        asyncio.run(work(out))


def _lines(path: str) -> Iterator[str]:
    with Path(path).open() as file:
        yield from file


VARIANTS: dict[str, Callable[[str, str], None]] = {
    "headrace": job(),
    "paced": job("paced", 1000),
    "vectors": vectors,
    "keep_v": job(keep_columns=("v",)),
    "to_pandas": to_table("pandas"),
    "to_polars": to_table("polars"),
    "to_arrow": to_table("arrow"),
    "plain_file": plain_file,
}


def peak_mib() -> float:
    """The most memory that this process held, in MiB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def main(arguments: Sequence[str]) -> None:
    """Run one variant; the last line printed is its figures."""
    name, source, sink = arguments
    sys.modules["benchmarks.jobs_runs"] = sys.modules[__name__]  # an engine named so is one of this very module
    _restart()
    VARIANTS[name](source, sink)
    ended = time.perf_counter()
    started, bare = _started
    first = _first[0] - started if _first else None
    print(json.dumps({"s": ended - started, "first_s": first, "mib": peak_mib(), "bare_mib": bare}))


if __name__ == "__main__":
    main(sys.argv[1:])
