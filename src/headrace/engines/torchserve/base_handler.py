"""A replacement for TorchServe's `BaseHandler`, if TorchServe is not installed.

It has the documented methods and attributes: `initialize`, `preprocess`, `inference`, `postprocess` and `handle`;
`model`, `mapping`, `device`, `manifest`, `context` and `initialized`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.engines.torchserve.context import Context
from headrace.engines.torchserve.files import FileValues, import_file, is_torchscript
from headrace.engines.torchserve.tools import list_classes_from_module, load_label_mapping


class BaseHandler:
    """Loads a TorchScript file, an ONNX model, or a state dict into the only class of `modelFile`."""

    # Class attributes: handlers may skip `__init__`, as TorchServe's micro-batching handler does.
    model: Any = None
    mapping: dict[str, str] | None = None
    device: torch.device | None = None
    manifest: FileValues | None = None
    context: Context | None = None
    model_yaml_config: Mapping[str, object] | None = None
    map_location: str | None = None
    model_pt_path: str | None = None
    initialized: bool | None = False
    explain = False
    target = 0

    def __init__(self) -> None:
        self.profiler_args: dict[str, object] = {}

    def initialize(self, context: Context) -> None:
        """Load the model that the manifest names, and `index_to_name.json` if it exists.

        Raises:
            FileNotFoundError: the manifest names no model file, or the file does not exist.
            ValueError: the file holds only weights, and the manifest names no class for them.
        """
        folder = Path(context.system_properties["model_dir"])
        gpu = context.system_properties["gpu_id"]
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config
        self.map_location = "cpu" if gpu is None else "cuda"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        described = context.manifest["model"]
        weights = folder / described["serializedFile"] if described.get("serializedFile") else None
        if weights is None or not weights.is_file():
            raise FileNotFoundError(f"no model file (serializedFile) in {folder}; override initialize to load another")
        self.model_pt_path = str(weights)
        if described.get("modelFile"):
            self.model = self._load_pickled_model(str(folder), described["modelFile"], self.model_pt_path)
        elif weights.suffix == ".onnx":
            self.model = _onnx_session(self.model_pt_path, self.map_location)
        elif is_torchscript(weights):
            self.model = self._load_torchscript_model(self.model_pt_path)
        else:
            raise ValueError(f"{weights.name} is not a TorchScript model; define the model's class in model.py")
        if isinstance(self.model, torch.nn.Module):
            self.model.to(self.device).eval()
        self.mapping = load_label_mapping(str(folder / "index_to_name.json"))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> torch.nn.Module:
        return torch.jit.load(model_pt_path, map_location=self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str) -> torch.nn.Module:
        model = _model_class(Path(model_dir) / model_file)()
        model.load_state_dict(torch.load(model_pt_path, map_location=self.device, weights_only=True))
        return model

    def preprocess(self, data: Sequence[Mapping[str, object]]) -> torch.Tensor:
        return torch.as_tensor([row.get("data") or row.get("body") for row in data], device=self.device)

    def inference(self, data: torch.Tensor, *args: object, **kwargs: object) -> Any:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: torch.Tensor) -> Sequence[object]:
        rows: list[object] = data.tolist()
        return rows

    def handle(self, data: Sequence[Mapping[str, object]], context: Context) -> Sequence[object]:
        """Process a batch; returns one answer per request."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def describe_handle(self) -> object:
        """Describe the handler; None unless overridden."""

    def get_device(self) -> torch.device | None:
        return self.device


def _model_class(file: Path) -> type[torch.nn.Module]:
    classes = list_classes_from_module(import_file(file), torch.nn.Module)
    if len(classes) != 1:
        raise ValueError(f"{file.name} must have one class that is a torch.nn.Module; it has {len(classes)}")
    return classes[0]


def _onnx_session(file: str, map_location: str) -> object:
    import onnxruntime

    wanted = ["CUDAExecutionProvider"] if map_location == "cuda" else []
    return onnxruntime.InferenceSession(file, providers=[*wanted, "CPUExecutionProvider"])
