"""Classify real texts of mixed length: headrace and transformers' pipeline, with the same model, texts and scores.

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
from benchmarks.streaming import compare, streamed
from examples.docstrings import collect
from headrace.engines.choosing import registry
from headrace.engines.model_folder import find_folder

TEXTS = 120 if quick() else 600
ROUNDS = 1 if quick() else 5
Outputs = list[dict[str, Any]]


def texts(count: int) -> list[str]:
    """Docstrings of the standard library, every n-th, in the order of their files."""
    found = list(collect().values())
    return found[:: len(found) // count][:count]


def large_classifier(folder: Path) -> Path:
    """All-MiniLM-L6-v2 with a new layer of 7 labels on it: its speed is that of a trained one."""
    source = str(find_folder(None))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=7)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, model_max_length=256).save_pretrained(folder)
    return folder


def first_lines(inputs: Sequence[str]) -> list[str]:
    """The summaries of docstrings: sentences of a few words to some dozens."""
    return [text.strip().split("\n\n")[0] for text in inputs]


def measure(title: str, folder: str, inputs: Sequence[str]) -> list[list[Any]]:
    """The variants on one model."""
    engine = registry.create("classify", folder, device="cpu", dtype="float32")
    peer = pipeline("text-classification", str(find_folder(folder)), device="cpu", dtype=torch.float32)
    cut = {"truncation": True, "max_length": engine.profile.max_model_len}
    name = f"{version('transformers')} pipeline"
    variants: dict[str, Callable[[], Outputs]] = {
        f"{name}, defaults": lambda: peer(list(inputs), **cut),
        f"{name}, batch_size=32, one round": lambda: peer(list(inputs), batch_size=32, **cut),
        "headrace, streaming": lambda: streamed(engine, inputs),
    }
    peer(list(inputs[:16]), **cut)
    streamed(engine, inputs[:16])
    return [[title, *row] for row in compare(ROUNDS, variants, "headrace, streaming")]


def main() -> None:
    """Measure both models and print the table."""
    whole = texts(TEXTS)
    short = first_lines(whole)
    with tempfile.TemporaryDirectory() as folder:
        large = str(large_classifier(Path(folder)))
        rows = measure("MiniLM (22 M), summaries", large, short)
        rows += measure("MiniLM (22 M), docstrings", large, whole)
    rows += measure("docstrings (0.2 M), docstrings", "docstrings", whole)
    report(
        "classification",
        "Classifying texts of mixed length on a CPU",
        ["model, texts", "variant", "texts/s", "headrace is x times as fast", "same label", "largest difference"],
        rows,
        [
            f"{TEXTS} docstrings of Python's library, or their first paragraphs (summaries), float32;",
            "cut at the model's length.",
            f"Medians of {ROUNDS} rounds, the variants in turn.",
        ],
    )


if __name__ == "__main__":
    main()
