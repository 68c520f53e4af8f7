"""Export a Hugging Face folder as a folder with an ONNX model, for `--engine onnx`.

    python scripts/export_onnx.py MODEL OUTPUT --task embed

The outputs are those of PyTorch to about five digits. The model takes any number of rows and tokens.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from headrace.engines.choosing import registry
from headrace.engines.model_folder import find_folder
from headrace.engines.text.encoders import restore

OUTPUTS = {
    "embed": "sentence_embedding",
    "classify": "logits",
    "score": "logits",
    "zero-shot": "logits",
    "image-classify": "logits",
    "image-embed": "image_embeds",
}


class Positional(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not looked into
    """What an engine computes, of tensors by position: pooling and normalising included."""

    def __init__(self, network: Any, names: list[str]) -> None:
        super().__init__()
        self.module = network.module
        self.call = network.call
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.call(dict(zip(self.names, tensors, strict=True)))
        return rows


def example(engine: Any, task: str) -> Mapping[str, Any]:
    """Arrays of two rows that the engine's network takes."""
    if task.startswith("image"):
        buffer = io.BytesIO()
        Image.new("RGB", (64, 48)).save(buffer, "PNG")
        [ready] = engine.prepare([buffer.getvalue()])
        return {"pixel_values": np.stack([ready.payload, ready.payload])}
    value = "some words of a text" if task in ("embed", "zero-shot") else ("some words of a text", "and others")
    [ready] = engine.prepare([value])
    rows = ready.payload[:1] if task == "zero-shot" else [ready.payload]
    arrays: Mapping[str, Any] = engine.tokens.collate(engine.tokens.rows_of(rows * 2), engine.network.inputs)
    return arrays


def export(model: str, output: Path, task: str) -> None:
    """Write `model.onnx` and the files that go with it to `output`."""
    options = {"labels": ["one"]} if task == "zero-shot" else {}
    engine = registry.create(task, model, device="cpu", dtype="float32", **options)
    for part in engine.network.module.modules():
        if isinstance(part, PreTrainedModel):
            restore(part)
    arrays = example(engine, task)
    rows = torch.export.Dim("rows", min=1, max=65_536)
    tokens = {} if task.startswith("image") else {1: torch.export.Dim("tokens", min=2, max=65_536)}
    output.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        Positional(engine.network, list(arrays)).eval(),
        tuple(torch.from_numpy(array) for array in arrays.values()),
        output / "model.onnx",
        dynamo=True,
        input_names=list(arrays),
        output_names=[OUTPUTS[task]],
        dynamic_shapes=(tuple({0: rows, **tokens} for _ in arrays),),
        external_data=False,
        verbose=False,
    )
    folder = find_folder(model)
    for path in (*folder.rglob("*.json"), *folder.glob("*.txt")):
        target = output / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder, or the name of a model that comes with Headrace")
    parser.add_argument("output", type=Path)
    parser.add_argument("--task", choices=OUTPUTS, required=True)
    options = parser.parse_args()
    export(options.model, options.output, options.task)
    print(f"wrote {options.output / 'model.onnx'}")


if __name__ == "__main__":
    main()
