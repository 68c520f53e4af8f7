"""Embedding real texts of mixed length: headrace against sentence-transformers, same model, texts and vectors.

python -m benchmarks.embedding
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from sentence_transformers import SentenceTransformer

from benchmarks.common import quick, ratio, report, rounds, version
from examples.docstrings import collect
from headrace import DynamicBatcher
from headrace.engines import registry
from headrace.engines.local_model import find_folder

TEXTS = 150 if quick() else 600
ROUNDS = 1 if quick() else 3
SIZES = (8, 16, 64)
Vectors = Any


def texts() -> list[str]:
    """Docstrings of the standard library, every n-th, in the order of their files."""
    found = list(collect().values())
    return found[:: len(found) // TEXTS][:TEXTS]


async def _streamed(engine: Any, inputs: Sequence[str]) -> Vectors:
    vectors: list[Any] = [None] * len(inputs)

    async def prepared() -> AsyncIterator[tuple[int, Any]]:
        for start in range(0, len(inputs), 64):
            chunk = await asyncio.to_thread(engine.prepare, inputs[start : start + 64])
            for index, item in enumerate(chunk, start):
                yield index, item

    async with DynamicBatcher[tuple[int, Any], Any](
        lambda batch: engine.forward([item.payload for _, item in batch]),
        cost_estimator=lambda item: item[1].cost,
        target_batch_cost=engine.default_batch_cost,
        max_batch_size=engine.default_batch_size,
        padded=engine.pads,
        length_bucketing=True,
    ) as batcher:
        async for (index, _), vector in batcher.as_completed(prepared()):
            vectors[index] = vector
    return np.stack(vectors)


def headrace_streaming(engine: Any, inputs: Sequence[str]) -> Vectors:
    """Texts as a stream, tokenized on threads, batched by exact tokens."""
    return asyncio.run(_streamed(engine, inputs))


def arrival_order(model: SentenceTransformer, inputs: Sequence[str]) -> Vectors:
    """Batches of 32 as the texts come, as a consumer of a stream has to do without bucketing."""
    return np.concatenate([model.encode(inputs[at : at + 32], batch_size=32) for at in range(0, len(inputs), 32)])


def main() -> None:
    """Measure all of them in turn and print the table."""
    inputs = texts()
    model = SentenceTransformer(str(find_folder(None)), device="cpu")
    engine = registry.create("embed")
    peer = version("sentence-transformers")
    variants: dict[str, Callable[[], Vectors]] = {
        f"{peer}, batches of 32 in arrival order": partial(arrival_order, model, inputs),
        f"{peer}, encode of the whole list": partial(model.encode, inputs),
        **{f"{peer}, encode, batch_size={size}": partial(model.encode, inputs, batch_size=size) for size in SIZES},
        "headrace, streaming": partial(headrace_streaming, engine, inputs),
    }
    vectors: dict[str, Vectors] = {}

    def seconds(name: str) -> float:
        started = time.perf_counter()
        vectors[name] = variants[name]()
        return time.perf_counter() - started

    headrace_streaming(engine, inputs[:32])
    model.encode(inputs[:32])
    figures = rounds(ROUNDS, {name: partial(seconds, name) for name in variants})
    ours = figures["headrace, streaming"]
    reference = vectors[f"{peer}, encode of the whole list"]
    rows = []
    for name, times in figures.items():
        cosines = np.sum(vectors[name] * reference, axis=1)  # both of length 1
        rows.append([name, len(inputs) / statistics.median(times), ratio(times, ours), f"{cosines.min():.6f}"])
    report(
        "embedding",
        "Embedding on a CPU, all-MiniLM-L6-v2, texts of mixed length",
        ["variant", "texts/s", "headrace is x times as fast", "least cosine to encode"],
        rows,
        [f"{len(inputs)} docstrings of Python's standard library; medians of {ROUNDS} rounds, the variants in turn."],
    )


if __name__ == "__main__":
    main()
