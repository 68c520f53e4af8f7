"""Reads a YAML or JSON file of settings that a user wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.argument_types import build, check_types, read_texts
from headrace.engines.choosing.config import model_name
from headrace.engines.choosing.registry import unknown_key
from headrace.errors import ConfigError
from headrace.extras import require
from headrace.options import all_declared, groups
from headrace.wording import shown

T = TypeVar("T")

_MOST_BYTES = 1024 * 1024
"""Maximum size of a file."""


def read_settings(path: Path) -> object:
    """The content of a file; YAML unless its name ends with .json.

    Raises:
        ConfigError: it cannot be read, is too large, is not YAML or JSON, or has a key twice.
        MissingExtraError: it is YAML and PyYAML is not installed.
    """
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)  # the file may be a pipe or a device, which have no size
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES:,} bytes; give a file of settings")
        text = content.decode()
        return json.loads(text, object_pairs_hook=_unique) if kind == "JSON" else _yaml(path, text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except _TwiceError as error:
        raise ConfigError(f"{path}: the key {shown(error.args[0])} is given twice in one place; keep one") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not {kind}: {' '.join(str(error).split())}") from error


class _TwiceError(Exception):
    """A mapping has a key twice."""


def from_keys(kind: type[T], entry: object, place: str, also: Sequence[str] = ()) -> T:
    """Settings of a mapping in a file, as flags would give them.

    Args:
        place: where it is, for errors.
        also: fields of the dataclass that it does not declare.

    Raises:
        ConfigError: it is no mapping, has an unknown key or lacks one, or a value cannot be used; the message names it.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} is of type {type(entry).__name__}; it must be a mapping of settings")
    every = all_declared(kind)
    known = [*(one.name for one in every), *also]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{place}: {shown(key)} is unknown{unknown_key(str(key), known)}")
    for one in every:
        if one.required and one.name not in entry:
            raise ConfigError(f"{place} needs {one.name}")
    try:
        given = {**entry, **read_texts(kind, entry)}
        made = build(kind, given | {"model": model_name(entry["model"])} if "model" in entry else given)
        for settings in (made, *(getattr(made, name) for name in groups(kind))):
            check_types(settings)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.args[0].replace('``', '')}") from error
    return made


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def _yaml(path: Path, text: str) -> object:
    yaml = require("yaml", "torch", f"{path}: YAML", ", or use a .json file")
    try:
        todo, seen = [yaml.compose(text, yaml.SafeLoader)], set()
        while todo:  # PyYAML itself would take the last of two values
            node = todo.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
                todo += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                todo += node.value
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(_yaml_error(error, text)) from error


def _yaml_error(error: Exception, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).replace(' in "<unicode string>"', "")
    lines = text.splitlines()
    found = lines[mark.line].strip() if mark.line < len(lines) else "the end of the file"
    return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'an error'}: {found:.100}"
