"""What `torch.compile` gains on a CPU, and what it takes first, in processor time on one thread.

python -m benchmarks.compiling
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.embedding import texts
from headrace.device.native import speeds
from headrace.device.precision import candidates
from headrace.engines.base import Prepared
from headrace.engines.choosing import registry
from headrace.engines.networks.prepacking import unpack
from headrace.engines.profile import profile_of
from headrace.engines.text.encoders import restore
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.forecast import pack
from headrace.records import Record

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else other processes compile, whose time is not counted
ROUNDS = 1 if quick() else 3
BUDGET = 4_096
"""Tokens of a batch, as a job on a CPU begins with."""


def spent_s() -> float:
    """Processor time of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


def as_it_is(dtype: str) -> Any:
    """The engine of jobs."""
    return registry.create("embed", device="cpu", dtype=dtype)


def whole(dtype: str) -> Any:
    """The engine with its encoder compiled for all shapes. It computes padding: leaving that out cannot be compiled."""
    engine = as_it_is(dtype)
    model = engine.network.module[0].model
    restore(model)
    model.forward = torch.compile(model.forward, dynamic=True)
    return engine


def feed_forward(dtype: str) -> Any:
    """The engine with its feed-forward layers compiled; attention leaves the padding out, as it does without."""
    engine = as_it_is(dtype)
    model = engine.network.module[0].model
    unpack(model)
    for layer in model.encoder.encoder.layer:
        layer.intermediate.compile(dynamic=True)
        layer.output.compile(dynamic=True)
    return engine


def batches_of(engine: Any, inputs: Sequence[str]) -> list[list[Any]]:
    """The texts as a job batches them."""
    ready = [one for one in engine.prepare(inputs) if isinstance(one, Prepared)]
    work = [Work(Record(n, str(n), {}), {}, one.payload, one.cost) for n, one in enumerate(ready)]
    packed = pack(work, replace(profile_of(engine), batch_cost=BUDGET))
    return [[item.payload for item in batch] for batch in packed]


def main() -> None:
    """Compile, then measure all in turn and print the table."""
    inputs = texts()
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for dtype in ("float32", *candidates(speeds(torch.device("cpu")))):
        makers: dict[str, Callable[[], Any]] = {
            "as Headrace runs it": partial(as_it_is, dtype),
            "encoder compiled": partial(whole, dtype),
            "feed-forward layers compiled": partial(feed_forward, dtype),
        }
        engines = {name: make() for name, make in makers.items()}
        batches = {name: batches_of(engine, inputs) for name, engine in engines.items()}
        vectors: dict[str, Any] = {}

        def seconds(
            name: str, engines: Any = engines, batches: Any = batches, vectors: dict[str, Any] = vectors
        ) -> float:
            started = spent_s()
            vectors[name] = np.concatenate([np.stack(engines[name].forward(batch)) for batch in batches[name]])
            return spent_s() - started

        first = {name: seconds(name) for name in engines}
        figures = rounds(ROUNDS, {name: partial(seconds, name) for name in engines})
        ours = figures["as Headrace runs it"]
        for name, took in figures.items():
            cost = max(first[name] - statistics.median(took), 0.0)
            gained = (statistics.median(ours) - statistics.median(took)) / len(inputs)
            pays = "" if name == "as Headrace runs it" else f"{cost / gained:,.0f} texts" if gained > 0 else "never"
            cosine = float(np.min(np.sum(vectors[name] * vectors["as Headrace runs it"], axis=1)))
            rows.append([dtype, name, cost, len(inputs) / statistics.median(took), ratio(ours, took), pays, cosine])
    report(
        "compiling",
        "torch.compile on a CPU, all-MiniLM-L6-v2",
        [
            "dtype",
            "variant",
            "first pass takes longer, CPU s",
            "texts per CPU s",
            "x as it is",
            "pays off after",
            "least cosine",
        ],
        rows,
        [
            f"{len(inputs)} docstrings of Python's standard library, batches of {BUDGET:,} tokens.",
            f"One thread; medians of {ROUNDS} rounds, the variants in turn. PyTorch {torch.__version__}.",
        ],
    )


if __name__ == "__main__":
    main()
