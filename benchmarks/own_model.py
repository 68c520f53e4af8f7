"""A PyTorch module of one's own over rows of arrays: the loop that people write, and Headrace on the same loader.

python -m benchmarks.own_model
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import headrace
from benchmarks.common import job_time, new_cache, quick, ratio, report, rounds
from headrace.observe.reporting.report import Report

ROWS = 10_000 if quick() else 100_000
SHARD = 2_000
WIDTH = 64
OUTPUTS = 64
ROUNDS = 1 if quick() else 3
SHARD_S = 0.035
"""What reading a shard from a store takes: 2,000 rows of 256 bytes at 15 MB/s. The reader waits and needs no core."""
BATCH = 32

torch.manual_seed(0)
NET = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU(),
    torch.nn.Linear(1024, OUTPUTS),
).eval()  # fmt: skip


def load() -> Iterator[np.ndarray]:
    """The rows, shard by shard."""
    generator = np.random.default_rng(0)
    for start in range(0, ROWS, SHARD):
        time.sleep(SHARD_S)
        yield from generator.standard_normal((min(SHARD, ROWS - start), WIDTH), np.float32)


def batches() -> Iterator[list[np.ndarray]]:
    """The rows in batches."""
    batch: list[np.ndarray] = []
    for row in load():
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def loop(folder: Path) -> float:
    """Load, collate, forward, write; returns the seconds."""
    started = time.perf_counter()
    number = 0
    with (folder / "loop.jsonl").open("w") as out, torch.inference_mode():
        for batch in batches():
            outputs = NET(torch.stack([torch.from_numpy(row) for row in batch]))
            for output in outputs:
                out.write(json.dumps({"id": number, "output": output.tolist()}) + "\n")
                number += 1
    return time.perf_counter() - started


def job(folder: Path, kind: str = "jsonl") -> Report:
    """The same as a job."""
    out = folder / f"job.{kind}"
    return headrace.run(load, engine=NET, sink=out, progress=False, overwrite=True)


def overhead_us(folder: Path) -> float:
    """Microseconds of a core that a record costs beside the model, in a job whose module does nothing: the slope."""

    def seconds(rows: int) -> float:
        began = time.process_time()
        array = np.zeros((rows, WIDTH), np.float32)
        nothing = torch.nn.Identity()
        headrace.run(array, engine=nothing, sink=folder / "nothing.parquet", progress=False, overwrite=True)
        return time.process_time() - began

    small, large = ROWS // 2, 2 * ROWS
    seconds(small)
    return (seconds(large) - seconds(small)) / (large - small) * 1e6


def same(folder: Path) -> bool:
    """Whether both wrote the same rows."""
    read = [[json.loads(line) for line in (folder / name).open()] for name in ("loop.jsonl", "job.jsonl")]
    numbers = [np.array([row["output"] for row in rows]) for rows in read]
    in_order = all([row["id"] for row in rows] == list(range(ROWS)) for rows in read)
    return in_order and bool(np.allclose(numbers[0], numbers[1], atol=1e-4))


def main() -> None:
    """Measure in turn and print."""
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as name, new_cache():
        folder = Path(name)

        def timed() -> float:
            done = job(folder)
            busy.append(done.busy)
            return job_time(done)

        timed()  # finds the size of batches, which is kept
        busy.clear()
        found = rounds(ROUNDS, {"loop": lambda: loop(folder), "job": timed})
        equal, cost = same(folder), overhead_us(folder)
    middle = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in found.items()}
    said = (
        f"The model was busy for {min(busy):.1%} of the job or more. Both wrote the same numbers: {equal}. A record "
        f"costs {cost:.1f} µs of a core beside the model, from an array to Parquet."
    )
    report(
        "own_model",
        f"{ROWS:,} rows of {WIDTH} numbers through a module of one's own, to JSON Lines",
        ("", "seconds", "rows/s", "times the loop"),
        [
            ("load, `torch.stack`, forward, write", middle["loop"], f"{ROWS / middle['loop']:,.0f}", 1.0),
            ("`headrace.run(load, engine=net)`", middle["job"], f"{ROWS / middle['job']:,.0f}",
             ratio(found["loop"], found["job"])),
        ],
        [
            said,
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
