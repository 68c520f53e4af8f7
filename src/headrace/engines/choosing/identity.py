"""Identify an engine without loading it, so that a finished job is recognised at once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from headrace.engines.choosing import registry
from headrace.engines.custom import search_current_folder
from headrace.errors import ConfigError

_MOST_FILES = 20_000
"""Limit for a named folder; a larger one is not searched."""


def identity(
    task: str, model: str | Path | None, engine: object, options: Mapping[str, object], commit: str | None = None
) -> str | None:
    """A digest of the engine's name, its options and the files they name; None if it cannot be determined.

    The files are the model, the source file of a custom engine, and every option that is a path. They count by size and
    modification time, not content: equal digests mean the same engine; after a difference the engine must be loaded.
    A model that is downloaded counts by its name and `commit`, so that its files need not be there.
    """
    try:
        local = [] if commit is not None else [model, registry.folder_of(task, model, engine)]
        if commit is None and registry.is_downloaded(task, model, engine):
            return None
        files: list[object] = [*local, *map(_file_part, options.values())]
        name = engine
        kind = registry.engine_named(task, engine)
        library = None if kind is None else kind.library
        if kind is None:
            name, code = _own_code(engine)
            files.append(code)
        facts = {
            "task": task,
            "engine": name,
            "model": None if model is None else str(model),
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
            **({} if commit is None else {"commit": commit}),
            "version": None if library is None else importlib.metadata.version(library),
            "files": [stats for path in files if _exists(path) for stats in _file_stats(Path(path).resolve())],
        }
        text = json.dumps(facts, sort_keys=True)
    except (ConfigError, OSError, LookupError, TypeError, ValueError, ImportError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _own_code(engine: object) -> tuple[str, str]:
    """The name of a custom engine and its source file. Raises LookupError: it is an instance, or has no source file."""
    if isinstance(engine, str):
        search_current_folder()
        spec = importlib.util.find_spec(engine.partition(":")[0])
        code = None if spec is None else spec.origin
        name = engine
    elif inspect.isfunction(engine) or inspect.isclass(engine):
        code, name = inspect.getsourcefile(engine), f"{engine.__module__}:{engine.__qualname__}"
    else:
        raise LookupError("an instance may depend on anything")
    if not _exists(code):
        raise LookupError("it has no source file")
    return name, str(code)


def _file_part(value: object) -> object:
    """The file of a TorchServe handler given as `file.py:function`; other values unchanged."""
    return value.partition(".py:")[0] + ".py" if isinstance(value, str) and ".py:" in value else value


def _exists(path: object) -> TypeGuard[str | Path]:
    return isinstance(path, (str, Path)) and str(path) != "" and os.path.exists(path)  # noqa: PTH110 - must not raise for a long text


def _file_stats(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and modification time of a file, or of all files in a folder except hidden and compiled ones.

    Raises:
        LookupError: the folder holds too many files.
    """
    found = [path] if path.is_file() else list(itertools.islice(path.rglob("*"), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise LookupError(f"{path} holds too many files")
    for file in sorted(found):
        inner = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inner):
            facts = file.stat()
            yield str(file), facts.st_size, facts.st_mtime_ns
