"""From the model that a user names to a version of it, and from there to a local folder.

`resolve` finds the version and refuses a model that cannot be used, before its weights are downloaded. `fetch`
downloads exactly this version. Both leave local models as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.library_settings import read
from headrace.engines.model_folder import ONNX_WEIGHTS
from headrace.engines.model_kinds import check_kind
from headrace.errors import ConfigError
from headrace.models import files
from headrace.models.base import Listing, RemoteModel
from headrace.models.names import remote_model


def resolve(config: EngineConfig) -> EngineConfig:
    """The configuration with the commit of a model that must be downloaded. Blocks for small files of the model.

    A commit that is set already is kept.

    Raises:
        ConfigError: there is no such model, or the task or engine cannot use it.
        EngineError: the hub cannot be asked, and the model is not in the cache.
    """
    model = remote_model_of(config)
    if model is None:
        return config
    if "revision" in config.engine_options:
        raise ConfigError(f"the engine's option revision is not used: write ``model={config.model}@REVISION``")
    found = model.look_up(config.commit)
    _check(config, model, found)
    return replace(config, commit=found.commit)


def fetch(config: EngineConfig) -> str | Path | None:
    """The model for the engine: a local folder where it must be downloaded, else as it is. Blocks.

    Raises:
        ConfigError, EngineError: as `resolve`, or the download fails.
    """
    model = remote_model_of(config)
    if model is None:
        return config.model
    found = model.look_up(config.commit)
    folder = _check(config, model, found)
    _check_architecture(config, folder)
    modules, code = _modules(folder), bool(config.engine_options.get("trust_remote_code"))
    wanted = [*files.setting_files(found.files, modules, code=code), *_weights_of(config, found, modules)]
    return model.download(found.commit, wanted, progress=True)


def moved(config: EngineConfig) -> str | None:
    """The newest commit, if the model's revision has left the commit of the configuration; None also if unknown."""
    model = remote_model_of(config)
    newest = None if model is None else model.newest()
    return None if newest == config.commit else newest


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """The names of the model in requests, the best first; empty for the task's default model."""
    if config.model is None:
        return ()
    model = remote_model_of(config)
    name = Path(config.model).name if model is None else model.name
    return tuple(dict.fromkeys((name, config.model)))


def remote_model_of(config: EngineConfig) -> RemoteModel | None:
    """The model if it must be downloaded. Raises ConfigError: its name has a wrong form."""
    if config.model is None:
        return None
    # With a commit, it was resolved elsewhere: a folder of that name on this machine is another model.
    if config.commit is None and not registry.is_downloaded(config.task or "", config.model, config.engine):
        return None
    return remote_model(config.model)


def _check(config: EngineConfig, model: RemoteModel, found: Listing) -> Path:
    """Check all that small files tell; returns the folder with them.

    Raises:
        ConfigError: the task or engine cannot use the model.
    """
    _check_files(config, found, ())
    folder = model.download(found.commit, files.setting_files(found.files))
    check_kind(config.task or "", folder, config.model or "")
    _check_files(config, found, _modules(folder))
    return folder


def _check_files(config: EngineConfig, found: Listing, folders: Sequence[str]) -> None:
    onnx, named = _loads_onnx(config), f"model {config.model!r}"
    if not {"config.json", "modules.json"} & set(found.files):
        other = "holds no config.json; give a model of transformers or sentence-transformers"
        raise ConfigError(f"{named} {files.reason_of_format(found.files) or other}")
    if "modules.json" in found.files and not folders:
        return  # its weights may be in folders that this file names
    weights = _weights_of(config, found, folders)
    if not weights:
        raise ConfigError(f"{named} {files.reason_without_weights(found.files, onnx=onnx)}")
    if (pickled := files.pickles(weights)) and not config.pickled_weights:
        raise ConfigError(
            f"{named} keeps its weights as pickle ({pickled[0]}), which can run code when it is read; choose a model "
            "or revision with safetensors, or pass ``pickled_weights=True`` if you trust it"
        )


def _weights_of(config: EngineConfig, found: Listing, folders: Sequence[str]) -> list[str]:
    if not _loads_onnx(config):
        return files.torch_weights(found.files, folders)
    try:
        return files.onnx_weights(found.files)
    except ConfigError as error:
        raise ConfigError(f"model {config.model!r} {error}") from error


def _loads_onnx(config: EngineConfig) -> bool:
    return config.declaration is not None and config.declaration.weights == ONNX_WEIGHTS


def _modules(folder: Path) -> list[str]:
    return [str(step.get("path", "")) for step in read(folder / "modules.json", []) if isinstance(step, Mapping)]


def _check_architecture(config: EngineConfig, folder: Path) -> None:
    """Check that transformers knows the architecture, or may run the model's own code. Imports transformers.

    Raises:
        ConfigError: it does not know it.
    """
    facts = read(folder / "config.json")
    declared = config.declaration
    if declared is None or not declared.by_transformers or "model_type" not in facts:
        return
    transformers = importlib.import_module("transformers")  # here, as it takes seconds
    kind, own = facts["model_type"], facts.get("auto_map")
    trusted = bool(config.engine_options.get("trust_remote_code"))
    if own and trusted:
        _refuse_foreign_code(config, own)
    elif kind not in transformers.CONFIG_MAPPING:
        way_out = f"upgrade transformers ({transformers.__version__} is installed), or choose another model"
        if own and config.has_option("trust_remote_code"):
            way_out = "it brings Python code of its own: pass ``trust_remote_code=True`` if you trust it"
        elif own:
            way_out = f"it needs Python code of its own, which task {config.task!r} does not run"
        raise ConfigError(f"model {config.model!r}: transformers does not know its architecture, {kind}; {way_out}")


def _refuse_foreign_code(config: EngineConfig, own: object) -> None:
    places = [str(place) for place in own.values()] if isinstance(own, Mapping) else []
    other = next((place.partition("--")[0] for place in places if "--" in place), None)
    if other is not None:
        raise ConfigError(
            f"model {config.model!r} runs Python code of another repository, {other}, which is not downloaded; use a "
            "local copy of both"
        )
