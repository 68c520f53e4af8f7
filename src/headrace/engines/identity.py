"""What an engine would be made of, told without loading it: so a finished job can be recognised at once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from headrace.engines import registry
from headrace.errors import ConfigError

_MOST_FILES = 20_000
"""In a folder that is named; what holds more is not looked through."""


def identity(task: str, model: str | Path | None, engine: object, options: Mapping[str, object]) -> str | None:
    """A digest of the engine's name and options and of the files they name; None where it cannot be told.

    Files count by size and time of change, not by content: the same digest means the same engine, another one means
    only that the engine must be asked. Those are the model, the file of an engine of one's own, and every option that
    is the path of a file or folder.
    """
    try:
        files: list[object] = [model, registry.folder_of(task, model, engine), *map(_file_part, options.values())]
        name = engine
        if engine is not None and (not isinstance(engine, str) or ":" in engine):
            name, code = _own_code(engine)
            files.append(code)
        facts = {
            "task": task,
            "engine": name,
            "model": None if model is None else str(model),
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
            "version": importlib.metadata.version("vllm") if engine == "vllm" else None,
            "files": [seen for path in files if _is_there(path) for seen in _seen(Path(path).resolve())],
        }
        text = json.dumps(facts, sort_keys=True)
    except (ConfigError, OSError, LookupError, TypeError, ValueError, ImportError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _own_code(engine: object) -> tuple[str, str]:
    """The name of an engine of one's own and the file that holds its code.

    Raises:
        LookupError: it is an object made already, or its code is in no file.
    """
    if isinstance(engine, str):
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)
        spec = importlib.util.find_spec(engine.partition(":")[0])
        code = None if spec is None else spec.origin
        name = engine
    elif inspect.isfunction(engine) or inspect.isclass(engine):
        code, name = inspect.getsourcefile(engine), f"{engine.__module__}:{engine.__qualname__}"
    else:
        raise LookupError("it may have been made of anything")
    if not _is_there(code):
        raise LookupError("its code is in no file")
    return name, str(code)


def _file_part(value: object) -> object:
    """A TorchServe handler may be named as `file.py:function`."""
    return value.partition(".py:")[0] + ".py" if isinstance(value, str) and ".py:" in value else value


def _is_there(path: object) -> TypeGuard[str | Path]:
    return isinstance(path, (str, Path)) and str(path) != "" and os.path.exists(path)  # noqa: PTH110 - a long text is no error


def _seen(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of a file, or of all in a folder that are not hidden or made by Python.

    Raises:
        LookupError: there are too many.
    """
    found = [path] if path.is_file() else list(itertools.islice(path.rglob("*"), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise LookupError(f"{path} holds too many files")
    for file in sorted(found):
        inner = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inner):
            facts = file.stat()
            yield str(file), facts.st_size, facts.st_mtime_ns
