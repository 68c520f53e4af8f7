"""What Headrace chooses by itself against a full grid of settings, and against sentence-transformers at its best.

python -m benchmarks.device                # about 12 minutes
python -m benchmarks.device --minutes 5    # stops after 5; run it again to go on
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from scripts.export_onnx import export
from sentence_transformers import SentenceTransformer

import headrace
from benchmarks.common import Parts, job_time, new_cache, quick, ratio, report, version
from benchmarks.embedding import texts
from headrace.device.native import speeds
from headrace.device.precision import candidates
from headrace.engines.model_folder import find_folder
from headrace.observe.reporting.report import Report

GRID_RECORDS = 150 if quick() else 600
RECORDS = 300 if quick() else 3_000
"""Of the jobs that are compared with what was chosen: tuning is included in their time."""
LONG = 4 * RECORDS
"""Of longer jobs, in which tuning is a smaller share."""
ROUNDS = 1 if quick() else 3
GRID_ROUNDS = 1
BUDGETS = (1_024, 4_096) if quick() else (512, 1_024, 2_048, 4_096, 8_192, 16_384)
SIZES = (16, 32) if quick() else (8, 16, 32, 64)


def rows(count: int) -> list[dict[str, Any]]:
    """So many docstrings; each comes several times where there are fewer."""
    return [{"id": str(n), "text": text} for n, text in enumerate(islice(cycle(texts()), count))]


def _drop(done: list[dict[str, Any]]) -> None:
    """Where outputs go that nobody wants."""


def job(inputs: Sequence[Any], model: str | None = None, **settings: Any) -> Report:
    """A whole job; the outputs are dropped."""
    return headrace.run(inputs, model, sink=_drop, task="embed", progress=False, **settings)


def job_seconds(inputs: Sequence[Any], model: str | None = None, **settings: Any) -> float:
    """Of a job, without loading its model and with tuning."""
    done = job(inputs, model, **settings)
    assert done.ok == len(inputs)
    return job_time(done)


def peer_seconds(model: SentenceTransformer, inputs: Sequence[Any], size: int) -> float:
    """Of sentence-transformers for the same texts."""
    started = time.perf_counter()
    model.encode([row["text"] for row in inputs], batch_size=size)
    return time.perf_counter() - started


def first_time(inputs: Sequence[Any], parts: Parts) -> float:
    """Seconds of a job as it comes, with nothing known of the machine. Keeps what it chose."""
    speeds.cache_clear()
    with new_cache():
        done = job(inputs)
    assert done.ok == len(inputs)
    numbers = done.precision
    chosen = f"{numbers.dtype} ({numbers.detail})" if numbers is not None else "nothing"
    parts.note("chosen", f"{chosen}, budget {done.budget or 'as the engine has it'}")
    return job_time(done)


def settings_of(dtypes: Sequence[str], onnx: Path) -> dict[str, dict[str, Any]]:
    """Every fixed setting of the grid, by name."""
    grid: dict[str, dict[str, Any]] = {}
    for budget in BUDGETS:
        for dtype in dtypes:
            grid[f"headrace, torch {dtype}, {budget} tokens"] = {"dtype": dtype, "batch_tokens": budget}
        own = {"model": str(onnx), "engine": "onnx", "batch_tokens": budget}
        grid[f"headrace, onnx float32, {budget} tokens"] = own
    return grid


def main() -> None:
    """Measure the grid and the peers in turns, then the best of them against what is chosen."""
    parts = Parts("device")
    dtypes = ["float32", *candidates(speeds(torch.device("cpu")))]
    small, large = rows(GRID_RECORDS), rows(RECORDS)
    peer = version("sentence-transformers")
    peers = {
        dtype: SentenceTransformer(str(find_folder(None)), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        for dtype in dtypes
    }
    with tempfile.TemporaryDirectory() as folder:
        export("all-MiniLM-L6-v2", Path(folder), "embed")
        grid = settings_of(dtypes, Path(folder))
        others = {
            f"{peer}, {dtype}, batch_size={size}": (model, size) for dtype, model in peers.items() for size in SIZES
        }
        figures = parts.rounds(
            GRID_ROUNDS,
            {name: partial(job_seconds, small, **setting) for name, setting in grid.items()}
            | {name: partial(peer_seconds, model, small, size) for name, (model, size) in others.items()},
        )
        best = min(grid, key=lambda name: statistics.median(figures[name]))
        best_peer = min(others, key=lambda name: statistics.median(figures[name]))
        finals: Mapping[str, Callable[[], float]] = {
            "headrace, as it comes": partial(first_time, large, parts),
            f"{best} (best of the grid)": partial(job_seconds, large, **grid[best]),
            f"{peer}, as it comes": partial(peer_seconds, peers["float32"], large, 32),
            f"{best_peer} (best of its grid)": partial(peer_seconds, *_args(others[best_peer], large)),
        }
        long = parts.rounds(ROUNDS, finals)
        longer = parts.rounds(
            ROUNDS,
            {
                "headrace, as it comes, longer job": partial(first_time, rows(LONG), parts),
                f"{best}, longer job": partial(job_seconds, rows(LONG), **grid[best]),
            },
        )
    table = [*_against(long, RECORDS), *_against(longer, LONG)]
    table += [
        [name, GRID_RECORDS, GRID_RECORDS / statistics.median(took), "", _spread(took)]
        for name, took in sorted(figures.items(), key=lambda item: statistics.median(item[1]))
    ]
    notes = [
        f"Docstrings of Python's library; medians of {ROUNDS} rounds (grid: {GRID_ROUNDS} round), in turn.",
        "Spread: slowest round / fastest. Tuning is included in the time as it comes, loading in none.",
        f"Chosen in each round: {'; '.join(parts.note('chosen'))}.",
    ]
    report(
        "device",
        "What is chosen, against a grid of settings, all-MiniLM-L6-v2 on a CPU",
        ["variant", "records", "texts/s", "headrace as it comes is x times as fast", "spread"],
        table,
        notes,
    )
    parts.done()


def _against(figures: Mapping[str, Sequence[float]], records: int) -> list[list[Any]]:
    """Rows of the table; the first variant is the one that the others are compared with."""
    ours = next(iter(figures.values()))
    return [
        [name, records, records / statistics.median(took), ratio(took, ours), _spread(took)]
        for name, took in figures.items()
    ]


def _args(
    chosen: tuple[SentenceTransformer, int], inputs: Sequence[Any]
) -> tuple[SentenceTransformer, Sequence[Any], int]:
    model, size = chosen
    return model, inputs, size


def _spread(times: Sequence[float]) -> float:
    return max(times) / min(times)


if __name__ == "__main__":
    main()
