"""Columns in the names of folders, as Hive, Spark and pyarrow write them: `year=2024/month=5/part.parquet`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")
"""An integer whose text is the same again."""


def partitions(files: Sequence[Path], root: Path) -> Mapping[Path, Mapping[str, object]]:
    """The columns of each file, from the folders between `root` and it, and `root` and those above it that name one.

    A column is of integers if the values in all folders are, else of text.
    """
    while _pair(root.name):
        root = root.parent
    found = {file: dict(pair for part in file.relative_to(root).parts[:-1] if (pair := _pair(part))) for file in files}
    names = {name for columns in found.values() for name in columns}
    whole = {name for name in names if all(_is_whole(columns.get(name)) for columns in found.values())}
    return {
        file: {name: int(value) if name in whole and value is not None else value for name, value in columns.items()}
        for file, columns in found.items()
        if columns
    }


def _pair(folder: str) -> tuple[str, str | None] | None:
    name, equals, value = folder.partition("=")
    return (unquote(name), None if value == _NULL else unquote(value)) if name and equals else None


def _is_whole(value: str | None) -> bool:
    return value is None or _WHOLE.fullmatch(value) is not None
