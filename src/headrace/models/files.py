"""Which files of a model an engine needs, by their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from headrace.errors import ConfigError

_SETTINGS = (".jinja", ".json", ".metadata", ".model", ".tiktoken", ".txt")
"""Suffixes of configuration, tokenizer and chat template files."""
_TEMPLATES = "additional_chat_templates"
_NAMED_WEIGHTS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors")
"""The files that transformers loads; others, such as model.fp16.safetensors, are copies."""
_NAMED_PICKLES = re.compile(r"(pytorch_model|adapter_model)(-\d+-of-\d+)?\.bin")
_PICKLES = (".bin", ".pt", ".pth")
_TRAINING = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
_ONNX = ("model.onnx", "onnx/model.onnx")
"""In a repository with several, the plain export: see `engines.onnx`."""
_ELSEWHERE = (
    ("model_index.json", "is a pipeline of diffusers; give a model of transformers or sentence-transformers"),
    (".gguf", "holds only GGUF files, which no engine here reads; give the repository that they were made from"),
    (".h5", "holds only TensorFlow weights; convert it to safetensors first"),
    (".msgpack", "holds only Flax weights; convert it to safetensors first"),
)
"""Signs of models that cannot be loaded, and what to say of them."""


def setting_files(names: Iterable[str], folders: Sequence[str] = ("",), *, code: bool = False) -> list[str]:
    """Configuration, tokenizer and chat templates in the root folder and in `folders`; Python files with `code`."""
    suffixes = (*_SETTINGS, ".py") if code else _SETTINGS
    return [name for name in names if name.endswith(suffixes) and _is_in(name, ("", _TEMPLATES, *folders), deep=code)]


def torch_weights(names: Sequence[str], folders: Sequence[str] = ()) -> list[str]:
    """The weights in the root folder and in `folders`: safetensors where there are any, else pickles."""
    return [name for folder in dict.fromkeys(("", *folders)) for name in _weights_in(folder, names)]


def pickles(files: Iterable[str]) -> list[str]:
    """Those of the files that are pickles, which can run code."""
    return [name for name in files if name.endswith(_PICKLES)]


def onnx_weights(names: Sequence[str]) -> list[str]:
    """One ONNX model, with the files of its external weights; empty if there is none.

    Raises:
        ConfigError: there are several, and none has the usual name.
    """
    models = [name for name in names if name.endswith(".onnx")]
    chosen = next((name for name in _ONNX if name in models), None)
    if chosen is None and len(models) > 1:
        raise ConfigError(f"holds several ONNX files ({', '.join(models)}) and none of them is model.onnx")
    chosen = chosen or next(iter(models), None)
    if chosen is None:
        return []
    return [name for name in names if name == chosen or name.startswith((f"{chosen}_data", f"{chosen}."))]


def reason_without_weights(names: Sequence[str], *, onnx: bool) -> str:
    """Why the engine cannot load a model with these files, and what to do."""
    if onnx and torch_weights(names):
        return "holds no ONNX model, but PyTorch weights: leave out ``engine=onnx``"
    if not onnx and any(name.endswith(".onnx") for name in names):
        return "holds only ONNX weights: choose the engine onnx (``engine=onnx``)"
    return reason_of_format(names) or "holds no weights (*.safetensors); choose another model or revision"


def reason_of_format(names: Sequence[str]) -> str:
    """Why no engine can load a model with these files, and what to do; empty if no file shows it."""
    return next((reason for sign, reason in _ELSEWHERE if any(name.endswith(sign) for name in names)), "")


def _weights_in(folder: str, names: Sequence[str]) -> list[str]:
    here = [name for name in names if _is_in(name, (folder,))]
    tensors = [name for name in here if name.endswith(".safetensors")]
    if tensors:
        return [name for name in tensors if _NAMED_WEIGHTS.fullmatch(_last(name))] or tensors
    found = [name for name in pickles(here) if not _last(name).startswith(_TRAINING)]
    return [name for name in found if _NAMED_PICKLES.fullmatch(_last(name))] or found


def _is_in(name: str, folders: Iterable[str], *, deep: bool = False) -> bool:
    folder = name.rpartition("/")[0]
    return folder in folders or (deep and name.endswith(".py") and not folder.startswith("."))


def _last(name: str) -> str:
    return name.rpartition("/")[2]
