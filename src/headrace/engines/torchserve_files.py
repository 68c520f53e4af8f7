"""What TorchServe's users have on disk: handler files, .mar archives, and the two kinds of configuration."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import ConfigError

_MANIFEST = "MAR-INF/MANIFEST.json"
_BUILT_IN = frozenset(
    {"image_classifier", "image_segmenter", "object_detector", "text_classifier", "text_generation", "base_handler"}
)
_CONFIG_FILES = ("model-config.yaml", "config.properties")
# Both spellings are documented: one for configuration files, one for the management interface.
_BATCH_SIZE = ("batchSize", "batch_size")
_BATCH_DELAY = ("maxBatchDelay", "max_batch_delay")


@dataclass(frozen=True, slots=True)
class HandlerFiles:
    """A handler and what goes with it."""

    handler: Path
    function: str | None
    """The function to call, where one is named."""
    model_dir: Path
    manifest: Mapping[str, Any]
    yaml_config: Mapping[str, Any]
    """The whole of model-config.yaml, which handlers read too."""
    batch_size: int
    batch_delay_s: float
    unpacked: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    """Holds an archive's files; to be cleaned up at the end."""


def read(handler: str | Path, model: str | Path | None, config: str | Path | None) -> HandlerFiles:
    """Everything about a handler.

    Args:
        handler: a Python file (with `:function` behind it if need be), a .mar archive or a folder with its content.
        model: the folder with the model's files; None for that of the handler.
        config: a model-config.yaml or config.properties; None for one beside the model or the handler.

    Raises:
        ConfigError: a file is missing or cannot be understood.
    """
    path = Path(handler).expanduser()
    if path.suffix == ".mar":
        return _from_archive(path, config)
    if path.is_dir():
        return _from_folder(path, config, None)
    file, function = _split(str(handler))
    if not file.is_file():
        raise ConfigError(f"there is no handler file {str(handler)!r}; give a .py file, a .mar archive or its folder")
    model_dir = Path(model).expanduser().resolve() if model is not None else file.parent
    if not model_dir.is_dir():
        raise ConfigError(f"model {str(model)!r} is no folder; give the one that holds the model's files")
    serialized = sorted([*model_dir.glob("*.pt"), *model_dir.glob("*.pth")])
    described = {"modelName": file.stem, "handler": file.name}
    if len(serialized) == 1:
        described["serializedFile"] = serialized[0].name
    return _assemble(file, function, model_dir, {"model": described}, _find_config(config, (model_dir, file.parent)))


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
    if not file.is_file():
        if wanted in _BUILT_IN:
            raise ConfigError(
                f"{name or folder} uses TorchServe's own handler {wanted}, which is not here; run its model with "
                "--task classify or --task image-classify, or name a handler file of your own"
            )
        raise ConfigError(f"{name or folder} names the handler {wanted!r} and does not hold it")
    named = described.get("configFile")
    found = _find_config(config or (folder / named if named else None), (folder,))
    return _assemble(file, function, folder.resolve(), manifest, found, unpacked)


def _assemble(
    handler: Path,
    function: str | None,
    model_dir: Path,
    manifest: Mapping[str, Any],
    config: Path | None,
    unpacked: tempfile.TemporaryDirectory[str] | None = None,
) -> HandlerFiles:
    settings = _settings(config, str(manifest["model"].get("modelName", ""))) if config else {}
    size = _number(config, settings, _BATCH_SIZE, default=1)
    delay = _number(config, settings, _BATCH_DELAY, default=100)
    yaml_config = settings if config is not None and config.suffix in (".yaml", ".yml") else {}
    return HandlerFiles(
        handler.resolve(), function, model_dir, manifest, yaml_config, max(size, 1), delay / 1000, unpacked
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


def _settings(config: Path, model: str) -> Mapping[str, Any]:
    """What a configuration says about one model."""
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
        raise ConfigError(f"{config} has settings for {', '.join(models)}, and none for {model!r}")
    chosen: dict[str, Any] = next(
        (one for one in versions.values() if one.get("defaultVersion")), next(iter(versions.values()), {})
    )
    return properties | chosen


def _properties(text: str) -> dict[str, str]:
    """Java's properties: `name=value` lines, which a backslash continues."""
    joined = "\n".join(line.strip() for line in text.splitlines() if line.strip()[:1] not in ("#", "!"))
    lines = joined.replace("\\\n", "").splitlines()
    return {name.strip(): value.strip() for name, sign, value in (line.partition("=") for line in lines) if sign}


def _number(config: Path | None, settings: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    name = next((name for name in names if name in settings), None)
    if name is None:
        return default
    try:
        value = int(settings[name])
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise ConfigError(f"{config}: {name} is {settings[name]!r}; it must be a whole number >= 0")
    return value
