"""Read TorchServe's files: handler files, .mar archives, and both configuration formats."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import yaml

from headrace.errors import ConfigError
from headrace.records import Json

_MANIFEST = "MAR-INF/MANIFEST.json"
_MODEL_FILE = "model.py"
# TorchServe's built-in handlers: module and class in this package; None if not supported.
_BUILT_IN = {
    "base_handler": ("base_handler", "BaseHandler"),
    "image_classifier": ("vision", "ImageClassifier"),
    "image_segmenter": ("vision", "ImageSegmenter"),
    "object_detector": ("vision", "ObjectDetector"),
    "text_classifier": None,
    "text_generation": None,
}
FileValues: TypeAlias = Mapping[str, Json]
"""What a manifest or a configuration file says, by key."""
_CONFIG_FILES = ("model-config.yaml", "config.properties")
# TorchServe documents both spellings: one for configuration files, one for the management API.
_BATCH_SIZE = ("batchSize", "batch_size")
_BATCH_DELAY = ("maxBatchDelay", "max_batch_delay")
# A model's limit takes precedence over the global one.
_RESPONSE_TIMEOUT = ("responseTimeout", "response_timeout", "default_response_timeout")
_STARTUP_TIMEOUT = ("startupTimeout", "startup_timeout", "default_startup_timeout")
_TIMEOUT_S = 120
"""TorchServe's default for both timeouts."""


@dataclass(frozen=True, slots=True)
class HandlerFiles:
    """A handler with its model files and settings."""

    handler: Path
    function: str | None
    """The function to call, if named."""
    model_dir: Path
    manifest: FileValues
    yaml_config: Mapping[str, object]
    """The content of model-config.yaml, which handlers read too."""
    batch_size: int
    batch_delay_s: float
    response_timeout_s: int
    """Time limit for a batch."""
    startup_timeout_s: int
    """Time limit for loading the model."""
    built_in: str | None = None
    """The class of a handler that is built into TorchServe; its file is a module of this package."""
    unpacked: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    """The folder of an unpacked archive, to be deleted on close."""

    @property
    def name(self) -> str:
        return self.built_in or self.handler.name


def read(handler: str | Path, model: str | Path | None, config: str | Path | None) -> HandlerFiles:
    """Read a handler's files and settings.

    Args:
        handler: a Python file (optionally with `:function`), a .mar archive or an unpacked archive.
        model: the folder with the model's files; None for the handler's folder.
        config: a model-config.yaml or config.properties; None for one beside the model or the handler.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    path = Path(handler).expanduser()
    if model is not None and (path.suffix == ".mar" or path.is_dir()):
        raise ConfigError(f"``model`` is {str(model)!r}, and the archive {path} has the model's files; leave it out")
    if path.suffix == ".mar":
        return _from_archive(path, config)
    if path.is_dir():
        return _from_folder(path, config, None)
    file, function = _split(str(handler))
    own = None
    if not file.is_file() and (own := _BUILT_IN.get(str(handler))):
        file = _file_of(own)
    if not file.is_file():
        raise ConfigError(f"there is no handler file {str(handler)!r}; name a .py file, a .mar archive or its folder")
    model_dir = Path(model).expanduser().resolve() if model is not None else Path() if own else file.parent
    if not model_dir.is_dir():
        raise ConfigError(f"model {str(model)!r} is not a folder; name the folder with the model's files")
    described = {"modelName": file.stem, "handler": file.name} | _model_files(model_dir)
    found = _find_config(config, (model_dir, file.parent))
    made = _assemble(file, function, model_dir, {"model": described}, found)
    return replace(made, built_in=own[1]) if own else made


def _model_files(model_dir: Path) -> dict[str, str]:
    """Manifest entries for a folder with one weights file, and `model.py` if the weights need a class."""
    serialized = sorted([*model_dir.glob("*.pt"), *model_dir.glob("*.pth")])
    if len(serialized) != 1:
        return {}
    needs_class = (model_dir / _MODEL_FILE).is_file() and not is_torchscript(serialized[0])
    return {"serializedFile": serialized[0].name} | ({"modelFile": _MODEL_FILE} if needs_class else {})


def is_torchscript(file: Path) -> bool:
    """Whether a PyTorch file contains a model with code, not only weights."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def import_file(file: Path) -> ModuleType:
    """Import a Python file as a module; it may import files beside it.

    Raises:
        BaseException: anything that its code raises.
    """
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "it is a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_archive(path: Path, config: str | Path | None) -> HandlerFiles:
    unpacked = tempfile.TemporaryDirectory(prefix="headrace-mar-")
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(unpacked.name)
    except (OSError, zipfile.BadZipFile) as error:
        unpacked.cleanup()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read model archive {str(path)!r}: {reason}") from error
    try:
        return _from_folder(Path(unpacked.name), config, unpacked, str(path))
    except ConfigError:
        unpacked.cleanup()
        raise


def _from_folder(
    folder: Path, config: str | Path | None, unpacked: tempfile.TemporaryDirectory[str] | None, name: str = ""
) -> HandlerFiles:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        described = manifest["model"]
        wanted = str(described["handler"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name or folder} holds no usable {_MANIFEST} ({type(error).__name__}: {error})") from error
    file, function = _split(wanted, folder)
    own = None if file.is_file() else _BUILT_IN.get(wanted)
    if not (file.is_file() or own):
        if wanted in _BUILT_IN:
            raise ConfigError(
                f"{name or folder} uses TorchServe's built-in handler {wanted}, which is not supported; run its model "
                "with ``task=classify`` or ``task=generate``, or name a custom handler file"
            )
        raise ConfigError(f"{name or folder} names the handler {wanted!r}, which it does not contain")
    named = described.get("configFile")
    found = _find_config(config or (folder / named if named else None), (folder,))
    made = _assemble(_file_of(own) if own else file, function, folder.resolve(), manifest, found)
    return replace(made, built_in=own[1] if own else None, unpacked=unpacked)


def _file_of(own: tuple[str, str]) -> Path:
    return Path(__file__).with_name(f"{own[0]}.py")


def _assemble(
    handler: Path, function: str | None, model_dir: Path, manifest: FileValues, config: Path | None
) -> HandlerFiles:
    settings = _settings(config, str(manifest["model"].get("modelName", ""))) if config else {}
    size = _number(config, settings, _BATCH_SIZE, default=1)
    delay = _number(config, settings, _BATCH_DELAY, default=100)
    yaml_config = settings if config is not None and config.suffix in (".yaml", ".yml") else {}
    return HandlerFiles(
        handler=handler.resolve(),
        function=function,
        model_dir=model_dir,
        manifest=manifest,
        yaml_config=yaml_config,
        batch_size=max(size, 1),
        batch_delay_s=delay / 1000,
        response_timeout_s=_number(config, settings, _RESPONSE_TIMEOUT, default=_TIMEOUT_S, least=1),
        startup_timeout_s=_number(config, settings, _STARTUP_TIMEOUT, default=_TIMEOUT_S, least=1),
    )


def _split(handler: str, folder: Path = Path()) -> tuple[Path, str | None]:
    """File and function of `file.py`, `file` or `file:function`."""
    name, _, function = handler.partition(":")
    file = folder / Path(name).expanduser()
    return (file if file.suffix == ".py" else file.with_name(file.name + ".py")), function or None


def _find_config(config: str | Path | None, folders: tuple[Path, ...]) -> Path | None:
    if config is not None:
        if not Path(config).is_file():
            raise ConfigError(f"there is no handler configuration {str(config)!r}")
        return Path(config)
    found = [folder / name for folder in folders for name in _CONFIG_FILES if (folder / name).is_file()]
    return found[0] if found else None


def _settings(config: Path, model: str) -> FileValues:
    try:
        if config.suffix in (".yaml", ".yml"):
            settings = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
            if not isinstance(settings, Mapping):
                raise ConfigError(f"{config} holds a {type(settings).__name__}, not settings")
            return settings
        properties = _properties(config.read_text(encoding="utf-8"))
        models = json.loads(properties.get("models", "{}"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read handler configuration {config}: {' '.join(str(error).split())}") from error
    versions = models.get(model) or (next(iter(models.values())) if len(models) == 1 else {})
    if models and not versions:
        raise ConfigError(f"{config} has settings for {', '.join(models)}, but not for {model!r}")
    chosen: dict[str, object] = next(
        (one for one in versions.values() if one.get("defaultVersion")), next(iter(versions.values()), {})
    )
    return properties | chosen


def _properties(text: str) -> dict[str, str]:
    """Parse Java properties: `name=value` lines; a backslash continues a line."""
    joined = "\n".join(line.strip() for line in text.splitlines() if line.strip()[:1] not in ("#", "!"))
    lines = joined.replace("\\\n", "").splitlines()
    return {name.strip(): value.strip() for name, sign, value in (line.partition("=") for line in lines) if sign}


def _number(config: Path | None, settings: FileValues, names: tuple[str, ...], default: int, least: int = 0) -> int:
    name = next((name for name in names if name in settings), None)
    if name is None:
        return default
    try:
        value = int(settings[name])
    except (TypeError, ValueError):
        value = -1
    if value < least:
        raise ConfigError(f"{config}: {name} is {settings[name]!r}; it must be a whole number >= {least}")
    return value
