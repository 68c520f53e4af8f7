"""Every engine that runs a batch it is given, with inputs that suit it: the same contract holds for all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.small_models import NLI, encoded, picture, text_model, vision_model

from headrace.engines.registry import create
from headrace.testing import FakeEngine

TEXTS = ["", "a", "the canal feeds the wheel", "so that it never runs dry " * 7, "naïve 水車", "words " * 300]
PAIRS = [(text, other) for text in TEXTS[1:4] for other in ("", "a mill", "turns and turns " * 9)]
NO_TEXTS = [None, 7, "half \ud800", ["a", "list"]]
IMAGES = [encoded(picture(width, 30, seed=width)) for width in (31, 8, 70, 30)]
NO_IMAGES = [None, b"no image", "/no/such/image.png", IMAGES[0][:60], 3]

HANDLER = """
import ts.torch_handler.base_handler


class Shouting(ts.torch_handler.base_handler.BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        return [row.get("data") or row.get("body") for row in data]

    def inference(self, data):
        return [text.decode().upper() for text in data]

    def postprocess(self, data):
        return data
"""


@dataclass(frozen=True, slots=True)
class Case:
    """An engine under contract."""

    make: Callable[[Path], Any]
    """Given an empty folder, an engine."""
    good: list[Any]
    bad: list[Any]


def own(values: list[Any]) -> list[Any]:
    """A user's function."""
    return [f"{value}!" for value in values]


def onnx(task: str, model: str, folder: Path) -> Any:
    """An ONNX engine of a model that is exported on the spot."""
    from scripts.export_onnx import export

    exported = folder.parent / f"onnx-{task}-{model}"  # takes seconds: made once for all tests
    if not exported.exists():
        export(model, exported, task)
    return create(task, exported, engine="onnx")


def archive(folder: Path) -> Any:
    """A TorchServe archive's engine."""
    manifest = {"model": {"modelName": "shout", "handler": "shout.py", "modelVersion": "1.0"}, "runtime": "python"}
    with zipfile.ZipFile(folder / "shout.mar", "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        mar.writestr("shout.py", HANDLER)
        mar.writestr("model-config.yaml", "batchSize: 8\nmaxBatchDelay: 20\n")
    return create("custom", engine="torchserve", handler=folder / "shout.mar")


ZERO_SHOT = {"labels": ["canal", "mill", "water wheel"]}

CASES: Mapping[str, Case] = {
    "fake": Case(lambda folder: FakeEngine(), TEXTS, NO_TEXTS[:2]),
    "function": Case(lambda folder: create("custom", engine="tests.contract.engines.cases:own"), TEXTS, []),
    "embed": Case(lambda folder: create("embed", device="cpu"), TEXTS, NO_TEXTS),
    "classify": Case(lambda folder: create("classify", "docstrings", device="cpu", top_labels=7), TEXTS, NO_TEXTS[:3]),
    "classify-pairs": Case(lambda folder: create("classify", text_model(folder), device="cpu"), PAIRS, NO_TEXTS[:3]),
    "score": Case(lambda folder: create("score", text_model(folder, ["x"]), device="cpu"), PAIRS, NO_TEXTS[:3]),
    "zero-shot": Case(
        lambda folder: create("zero-shot", text_model(folder, NLI), device="cpu", **ZERO_SHOT), TEXTS, NO_TEXTS
    ),
    "image-classify": Case(lambda folder: create("image-classify", "digits", device="cpu"), IMAGES, NO_IMAGES),
    "image-embed": Case(
        lambda folder: create("image-embed", vision_model(folder, "clip"), device="cpu"), IMAGES, NO_IMAGES
    ),
    "onnx-embed": Case(lambda folder: onnx("embed", "docstrings", folder), TEXTS, NO_TEXTS),
    "onnx-classify": Case(lambda folder: onnx("classify", "docstrings", folder), TEXTS, NO_TEXTS[:3]),
    "onnx-image-classify": Case(lambda folder: onnx("image-classify", "digits", folder), IMAGES, NO_IMAGES),
    "torchserve": Case(archive, TEXTS, [None, "half \ud800"]),
}
