"""Addresses of datasets on the Hugging Face Hub: `hf://datasets/org/name@revision?config=main&split=train`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from headrace.errors import ConfigError

_PREFIX = "hf://datasets/"
_DATASET = re.compile(r"hf://datasets/((?:[\w\-.]+/)?[\w\-.]+)(?:@([^/?#\s]+))?/?(?:\?([^#]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class DatasetAddress:
    """A dataset, whole or a part of it. Paths of files in it are no such addresses."""

    name: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    columns: tuple[str, ...] = ()

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        given = {"config": self.config, "split": self.split, "columns": ",".join(self.columns)}
        query = urlencode({key: value for key, value in given.items() if value}, quote_via=quote, safe=",")
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"{_PREFIX}{self.name}{at}{'?' + query if query else ''}"


def is_dataset_address(name: object) -> bool:
    """Whether a name is the address of a dataset, not of a file or folder in it."""
    return isinstance(name, str) and _DATASET.fullmatch(name) is not None


def parse_dataset(name: str, allowed: Collection[str]) -> DatasetAddress:
    """The dataset that an address names.

    Args:
        name: for which `is_dataset_address` is true.
        allowed: what may follow the question mark.

    Raises:
        ConfigError: something else does.
    """
    found = _DATASET.fullmatch(name)
    assert found is not None, "checked by `is_dataset_address`"
    options = dict(parse_qsl(found[3] or "", keep_blank_values=True))
    for key, value in options.items():
        if key not in allowed or not value:
            problem = "is empty" if key in allowed else "is not known"
            raise ConfigError(f"cannot use {name}: {key!r} {problem}; known: {', '.join(allowed)}")
    columns = tuple(filter(None, options.get("columns", "").split(",")))
    revision = unquote(found[2]) if found[2] else None
    return DatasetAddress(found[1], revision, options.get("config"), options.get("split"), columns)
