"""From JPEG files to a network's input: processor seconds an image, of transformers' own path and of Headrace.

python -m benchmarks.pixels
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
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_images
from transformers import BaseImageProcessor, ViTConfig, ViTForImageClassification
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from benchmarks.common import quick, report, rounds
from headrace.engines.vision.images import ImageInputs

FILES = 12 if quick() else 60
COMPARED = 24 if quick() else 1000
ROUNDS = 1 if quick() else 3
SIZES = {"0.3 to 1.8": (640, 1552, 480, 1120), "12, on their sides": (4032, 4033, 3024, 3025)}
"""Megapixels, and the ranges of width and height."""
SETS = {"0.3 to 1.8": FILES, "12, on their sides": max(4, FILES // 10)}
PROCESSORS: dict[str, BaseImageProcessor] = {
    "ViT, 224, bilinear": ViTImageProcessorPil(),
    "CLIP, 224, bicubic": CLIPImageProcessorPil(),
}


def photograph(number: int, width: int, height: int, sources: Sequence[Image.Image]) -> Image.Image:
    """A part of a photograph, in other colours, with some shapes of one colour in front of it, and a sensor's noise."""
    dice = np.random.default_rng(number)
    source = sources[number % len(sources)]
    left, top = dice.integers(0, source.width // 2), dice.integers(0, source.height // 2)
    wide, high = dice.integers(120, source.width // 2), dice.integers(90, source.height // 2)
    picture = source.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + wide, top + high))
    bands = picture.split()
    picture = Image.merge("RGB", [bands[band] for band in dice.permutation(3)])
    draw = ImageDraw.Draw(picture)
    for _ in range(dice.integers(0, 6)):
        x, y, size = dice.integers(0, width), dice.integers(0, height), dice.integers(width // 40, width // 2)
        colour = tuple(dice.integers(0, 256, 3).tolist())
        (draw.ellipse if dice.random() < 0.5 else draw.rectangle)((x, y, x + size, y + size), fill=colour)
    return Image.fromarray((np.asarray(picture) + dice.normal(0, 3, (height, width, 1))).clip(0, 255).astype(np.uint8))


def photographs(folder: Path, name: str, count: int) -> list[str]:
    """JPEG files of sizes from a range; of the large ones, EXIF says that they lie on their sides."""
    sources = [Image.fromarray(array) for array in load_sample_images().images]
    least_wide, most_wide, least_high, most_high = SIZES[name]
    exif = Image.Exif()
    if least_wide > 2000:
        exif[0x0112] = 6
    files = []
    for number in range(count):
        dice = np.random.default_rng(number)
        width, height = int(dice.integers(least_wide, most_wide)), int(dice.integers(least_high, most_high))
        files.append(str(folder / f"{len(name)}-{number}.jpg"))
        photograph(number, width, height, sources).save(files[-1], quality=90, exif=exif)
    return files


def ways(processor: BaseImageProcessor) -> dict[str, Callable[[str], object]]:
    """From the name of a file to pixels, in each way."""
    exact, auto = ImageInputs(processor, pixels="exact"), ImageInputs(processor)
    assert exact.preparer is not None and auto.preparer is not None and auto.preparer.transform.fast

    def own(file: str) -> object:
        return processor(images=load_image(file), return_tensors="np")["pixel_values"]

    return {
        "transformers' processor": own,
        "headrace, --pixels exact": lambda file: exact.prepare([file]),
        "headrace": lambda file: auto.prepare([file]),
        "headrace, 8 bits": lambda file: auto.preparer.prepare_column([file]) if auto.preparer else None,
    }


def slope(way: Callable[[str], object], files: Sequence[str]) -> float:
    """Processor seconds an image: those of all files less those of a half, so that what comes once is not counted."""
    times = []
    for part in (files[: len(files) // 2], files):
        started = time.thread_time()
        for file in part:
            way(file)
        times.append(time.thread_time() - started)
    return (times[1] - times[0]) / (len(files) - len(files) // 2)


def speeds(folder: Path) -> list[list[Any]]:
    """A row for each processor, size and way."""
    rows = []
    for size, count in SETS.items():
        files = photographs(folder, size, count)
        for title, processor in PROCESSORS.items():
            all_ways = ways(processor)
            for way in all_ways.values():
                way(files[0])
            figures = rounds(ROUNDS, {name: partial(slope, way, files) for name, way in all_ways.items()})
            medians = {name: statistics.median(found) for name, found in figures.items()}
            peer = medians["transformers' processor"]
            rows += [[title, size, name, 1000 * one, 1 / one, peer / one] for name, one in medians.items()]
    return rows


def sameness(folder: Path) -> list[list[Any]]:
    """Labels and vectors of a network of random weights, beside those of the processor's pixels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    network = ViTForImageClassification(ViTConfig(**sizes, num_labels=1000)).eval()
    files = photographs(folder, "0.3 to 1.8", COMPARED)
    rows = []
    for title, processor in PROCESSORS.items():
        inputs = ImageInputs(processor)
        labels, cosines, levels, seen = 0, [], [], set()
        for file in files:
            wanted = processor(images=load_image(file), return_tensors="np")["pixel_values"][0]
            [found] = inputs.prepare([file])
            assert not isinstance(found, Exception) and inputs.normalization is not None
            step = inputs.normalization.scale / np.array(inputs.normalization.std)
            levels.append(np.abs((found.payload - wanted) / step[:, None, None]))
            with torch.inference_mode():
                made = network(torch.from_numpy(np.stack([found.payload, wanted])), output_hidden_states=True)
            one, other = made.hidden_states[-1][:, 0]
            cosines.append(float(torch.cosine_similarity(one, other, dim=0)))
            ours, theirs = made.logits.argmax(1).tolist()
            labels += ours == theirs
            seen.add(theirs)
        mean = float(np.mean([one.mean() for one in levels]))
        rows.append(
            [title, f"{labels} of {len(files)}", len(seen), f"{min(cosines):.6f}", mean, max(map(np.max, levels))]
        )
    return rows


def main() -> None:
    """Measure, and print two tables."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        speed, same = speeds(Path(folder)), sameness(Path(folder))
    report(
        "pixels",
        "From JPEG files to a network's input, on a CPU",
        [
            "processor",
            "megapixels",
            "way",
            "ms an image",
            "images/s and core",
            "x transformers' processor",
        ],
        speed,
        [
            "Processor time of one thread, decoding included. 8 bits: as blocks hold them, and a GPU takes them.",
            f"The slope between half of the files and all: {FILES}, of the large ones {SETS['12, on their sides']}.",
            f"Medians of {ROUNDS} rounds, the ways in turn.",
        ],
    )
    report(
        "pixels-sameness",
        "Labels and vectors, beside those of transformers' processor",
        ["processor", "same label", "labels seen", "least cosine", "mean difference of a pixel", "largest"],
        same,
        ["Headrace as it comes; a ViT-Ti/16 of random weights, float32; pixels of the network's input, of 255."],
    )


if __name__ == "__main__":
    main()
