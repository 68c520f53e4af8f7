"""A base class for handlers that were written on TorchServe's `BaseHandler`, where TorchServe is not installed.

It keeps the documented methods and attributes: `initialize`, `preprocess`, `inference`, `postprocess` and `handle`;
`model`, `mapping`, `device`, `manifest`, `context` and `initialized`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from headrace.engines.torchserve_context import Context


class BaseHandler:
    """Loads a TorchScript file, or a state dict into the one module class of `modelFile`."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, Any] | None = None
        self.device: torch.device | None = None
        self.manifest: Any = None
        self.context: Context | None = None
        self.map_location = "cpu"
        self.model_pt_path: str | None = None
        self.initialized = False
        self.explain = False
        self.target = 0

    def initialize(self, context: Context) -> None:
        """Load the model the manifest names, and `index_to_name.json` where there is one.

        Raises:
            FileNotFoundError: the manifest names no model file, or one that is not there.
        """
        folder = Path(context.system_properties["model_dir"])
        gpu = context.system_properties["gpu_id"]
        self.context, self.manifest = context, context.manifest
        self.map_location = "cpu" if gpu is None else "cuda"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        described = context.manifest["model"]
        weights = folder / described["serializedFile"] if described.get("serializedFile") else None
        if weights is None or not weights.is_file():
            raise FileNotFoundError(f"no model file (serializedFile) in {folder}; override initialize to load another")
        self.model_pt_path = str(weights)
        if described.get("modelFile"):
            self.model = _module_of(folder / described["modelFile"])()
            self.model.load_state_dict(torch.load(weights, map_location=self.device, weights_only=True))
        else:
            self.model = torch.jit.load(weights, map_location=self.device)
        self.model.to(self.device).eval()
        names = folder / "index_to_name.json"
        self.mapping = json.loads(names.read_text(encoding="utf-8")) if names.is_file() else None
        self.initialized = True

    def preprocess(self, data: Any) -> Any:
        """The requests as one tensor."""
        return torch.as_tensor([row.get("data") or row.get("body") for row in data], device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> list[Any]:
        """The rows of a tensor as lists."""
        rows: list[Any] = data.tolist()
        return rows

    def handle(self, data: Any, context: Context) -> list[Any]:
        """One answer per request."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))


def _module_of(file: Path) -> Any:
    """The one class of a file that is a torch module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "it is a .py file"
    source: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    classes = [
        kind
        for _, kind in inspect.getmembers(source, inspect.isclass)
        if issubclass(kind, torch.nn.Module) and kind.__module__ == source.__name__
    ]
    if len(classes) != 1:
        raise ValueError(f"{file.name} must have one class that is a torch.nn.Module; it has {len(classes)}")
    return classes[0]
