"""Embed real texts of mixed length: headrace and sentence-transformers, with the same model, texts and vectors.

python -m benchmarks.embedding
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from scripts.export_onnx import export
from sentence_transformers import SentenceTransformer

from benchmarks.common import quick, ratio, report, rounds, version
from benchmarks.streaming import streamed
from examples.docstrings import collect
from headrace.engines.choosing import registry
from headrace.engines.model_folder import find_folder

TEXTS = 150 if quick() else 600
ROUNDS = 1 if quick() else 3
SIZES = (8, 16, 64)
Vectors = Any


def texts() -> list[str]:
    """Docstrings of the standard library, every n-th, in the order of their files."""
    found = list(collect().values())
    return found[:: len(found) // TEXTS][:TEXTS]


def headrace_streaming(engine: Any, inputs: Sequence[str]) -> Vectors:
    """Texts as a stream, tokenized on threads, batched by exact tokens."""
    return np.stack(streamed(engine, inputs))


def arrival_order(model: SentenceTransformer, inputs: Sequence[str]) -> Vectors:
    """Batches of 32 as the texts come, as a consumer of a stream has to do without bucketing."""
    return np.concatenate([model.encode(inputs[at : at + 32], batch_size=32) for at in range(0, len(inputs), 32)])


def main() -> None:
    """Measure all of them in turn and print the table."""
    inputs = texts()
    model = SentenceTransformer(str(find_folder(None)), device="cpu")
    engine = registry.create("embed", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        export("all-MiniLM-L6-v2", Path(folder), "embed")
        onnx = registry.create("embed", folder, engine="onnx")
    peer = version("sentence-transformers")
    variants: dict[str, Callable[[], Vectors]] = {
        f"{peer}, batches of 32 in arrival order": partial(arrival_order, model, inputs),
        f"{peer}, encode of the whole list": partial(model.encode, inputs),
        **{f"{peer}, encode, batch_size={size}": partial(model.encode, inputs, batch_size=size) for size in SIZES},
        "headrace, streaming": partial(headrace_streaming, engine, inputs),
        f"headrace, streaming, {version('onnxruntime')}": partial(headrace_streaming, onnx, inputs),
    }
    vectors: dict[str, Vectors] = {}

    def seconds(name: str) -> float:
        started = time.perf_counter()
        vectors[name] = variants[name]()
        return time.perf_counter() - started

    headrace_streaming(engine, inputs[:32])
    headrace_streaming(onnx, inputs[:32])
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
