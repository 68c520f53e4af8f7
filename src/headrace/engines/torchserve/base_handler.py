"""A base class for handlers that were written on TorchServe's `BaseHandler`, where TorchServe is not installed.

It keeps the documented methods and attributes: `initialize`, `preprocess`, `inference`, `postprocess` and `handle`;
`model`, `mapping`, `device`, `manifest`, `context` and `initialized`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.engines.torchserve.context import Context
from headrace.engines.torchserve.files import import_file, is_torchscript
from headrace.engines.torchserve.tools import list_classes_from_module, load_label_mapping


class BaseHandler:
    """Loads a TorchScript file, an ONNX model, or a state dict into the one class of `modelFile`."""

    # Attributes of the class too: a handler need not call `__init__`, as TorchServe's own with micro-batches does not.
    model: Any = None
    mapping: dict[str, str] | None = None
    device: torch.device | None = None
    manifest: Mapping[str, Any] | None = None
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
        """Load the model the manifest names, and `index_to_name.json` where there is one.

        Raises:
            FileNotFoundError: the manifest names no model file, or one that is not there.
            ValueError: the file holds weights, and no class is named to load them into.
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
            raise ValueError(f"{weights.name} holds no TorchScript model; put the class of its weights into model.py")
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
        """The requests as one tensor."""
        return torch.as_tensor([row.get("data") or row.get("body") for row in data], device=self.device)

    def inference(self, data: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """The model's output."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """The rows of a tensor as lists."""
        rows: list[object] = data.tolist()
        return rows

    def handle(self, data: Sequence[Mapping[str, object]], context: Context) -> list[Any]:
        """One answer per request."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def describe_handle(self) -> object:
        """What a handler tells of itself: nothing, unless it overrides this."""

    def get_device(self) -> torch.device | None:
        """Where the model is."""
        return self.device


def _model_class(file: Path) -> type[torch.nn.Module]:
    """The one class of a file that is a torch module."""
    classes = list_classes_from_module(import_file(file), torch.nn.Module)
    if len(classes) != 1:
        raise ValueError(f"{file.name} must have one class that is a torch.nn.Module; it has {len(classes)}")
    return classes[0]


def _onnx_session(file: str, map_location: str) -> object:
    import onnxruntime

    wanted = ["CUDAExecutionProvider"] if map_location == "cuda" else []
    return onnxruntime.InferenceSession(file, providers=[*wanted, "CPUExecutionProvider"])
