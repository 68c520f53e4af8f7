"""Classify JPEG files, decoding included: jobs of Headrace and transformers' pipeline, with the same models and files.

python -m benchmarks.vision
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from benchmarks.common import quick, report, version
from benchmarks.streaming import Timed, compare, job, timed

IMAGES = 24 if quick() else 600
ROUNDS = 1 if quick() else 2
OURS = "headrace, as it comes"


def photographs(folder: Path) -> list[str]:
    """JPEG files of many sizes: parts of the two photographs of scikit-learn, enlarged to what cameras make."""
    pictures = [Image.fromarray(array) for array in load_sample_images().images]
    files = []
    for number in range(IMAGES):
        width, height = 640 + 48 * (number % 20), 480 + 40 * (number % 17)
        box = (number % 40, number % 30, 600 - number % 50, 400 - number % 35)
        picture = pictures[number % 2].resize((width, height), Image.Resampling.BICUBIC, box=box)
        files.append(str(folder / f"{number}.jpg"))
        picture.save(files[-1], quality=90)
    return files


def models(folder: Path) -> dict[str, Path]:
    """Two architectures with random weights: their speed is that of trained ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    made: dict[str, Any] = {
        "ViT-Ti/16": ViTForImageClassification(ViTConfig(**sizes, num_labels=1000)),
        "ResNet-18": ResNetForImageClassification(
            ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000)
        ),
    }
    folders = {}
    for name, model in made.items():
        folders[name] = folder / name.partition("/")[0]
        model.save_pretrained(folders[name])
        ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folders[name])
    return folders


def measure(title: str, folder: Path, files: Sequence[str]) -> list[list[Any]]:
    """The variants on one model."""
    peer = pipeline("image-classification", str(folder), device="cpu", dtype=torch.float32)
    name = f"{version('transformers')} pipeline"
    rows = [{"image": file} for file in files]

    def alone(**options: Any) -> list[dict[str, Any]]:
        return [labels[0] for labels in peer(list(files), top_k=1, **options)]

    variants: dict[str, Callable[[], Timed]] = {
        f"{name}, defaults": lambda: timed(alone),
        f"{name}, batch_size=8": lambda: timed(lambda: alone(batch_size=8)),
        "headrace, --dtype float32": lambda: job("image-classify", folder, rows, dtype="float32"),
        OURS: lambda: job("image-classify", folder, rows),
    }
    peer(list(files[:4]))
    job("image-classify", folder, rows[:16])
    return [[title, *row] for row in compare(ROUNDS, variants, OURS)]


def main() -> None:
    """Measure both models and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        files = photographs(Path(folder))
        rows = [row for title, model in models(Path(folder)).items() for row in measure(title, model, files)]
    report(
        "vision",
        "Classifying JPEG files on a CPU, decoding included",
        ["model", "variant", "images/s", "headrace is x times as fast", "same label", "largest difference of a score"],
        rows,
        [
            f"{IMAGES} JPEG files of 0.3 to 1.8 megapixels, random weights. The pipeline computes in float32.",
            "Of jobs, tuning is included in the time, loading is not.",
            f"Medians of {ROUNDS} rounds, the variants in turn.",
        ],
    )


if __name__ == "__main__":
    main()
