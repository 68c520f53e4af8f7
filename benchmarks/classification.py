"""Classify real texts of mixed length: jobs of Headrace and transformers' pipeline, with the same model and texts.

python -m benchmarks.classification
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from benchmarks.common import quick, report, version
from benchmarks.streaming import Timed, compare, job, timed
from examples.docstrings import collect
from headrace.engines.choosing import registry
from headrace.engines.model_folder import find_folder

TEXTS = 120 if quick() else 3_000
ROUNDS = 1 if quick() else 2
OURS = "headrace, as it comes"


def texts(count: int) -> list[str]:
    """Docstrings of the standard library, every n-th, in the order of their files."""
    found = list(collect().values())
    return found[:: max(1, len(found) // count)][:count]


def large_classifier(folder: Path) -> Path:
    """All-MiniLM-L6-v2 with a new layer of 7 labels on it: its speed is that of a trained one."""
    source = str(find_folder(None))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=7)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, model_max_length=256).save_pretrained(folder)
    return folder


def measure(title: str, folder: str, inputs: Sequence[str]) -> list[list[Any]]:
    """The variants on one model."""
    path = find_folder(folder)
    peer = pipeline("text-classification", str(path), device="cpu", dtype=torch.float32)
    engine = registry.create("classify", folder, device="cpu")
    cut = {"truncation": True, "max_length": engine.profile.max_model_len}
    rows = [{"text": text} for text in inputs]
    name = f"{version('transformers')} pipeline"
    variants: dict[str, Callable[[], Timed]] = {
        f"{name}, defaults": lambda: timed(lambda: peer(list(inputs), **cut)),
        f"{name}, batch_size=32, one round": lambda: timed(lambda: peer(list(inputs), batch_size=32, **cut)),
        "headrace, --dtype float32": lambda: job("classify", path, rows, dtype="float32"),
        OURS: lambda: job("classify", path, rows),
    }
    peer(list(inputs[:16]), **cut)
    job("classify", path, rows[:16])
    return [[title, *row] for row in compare(ROUNDS, variants, OURS)]


def main() -> None:
    """Measure both models and print the table."""
    inputs = texts(TEXTS)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure("MiniLM (22 M)", str(large_classifier(Path(folder))), inputs)
    rows += measure("docstrings (0.2 M)", "docstrings", inputs)
    report(
        "classification",
        "Classifying texts of mixed length on a CPU",
        ["model", "variant", "texts/s", "headrace is x times as fast", "same label", "largest difference"],
        rows,
        [
            f"{TEXTS:,} docstrings of Python's library.",
            "The pipeline computes in float32. Of jobs, tuning is included in the time, loading is not.",
            f"Medians of {ROUNDS} rounds, the variants in turn.",
        ],
    )


if __name__ == "__main__":
    main()
