"""Checks, before a job starts, that its output can hold the columns that it copies."""

from __future__ import annotations

import datetime
import decimal
import logging
from collections.abc import Sequence

from headrace.errors import ConfigError, tried
from headrace.io.formats.arrow_types import held_type, nests_dictionary, read_back
from headrace.io.formats.cells import Cell
from headrace.io.formats.strict_json import StrictJson, json_default
from headrace.io.formats.values import plain

_NOT_IN_JSON = (bytes, datetime.timedelta, decimal.Decimal)
"""Arrow types whose values JSON cannot hold: a column of such a type never comes from JSON rows."""
logger = logging.getLogger("headrace")


def check_parquet_column(name: str, values: Sequence[object]) -> None:
    """Check the first values of a column for Parquet; warn where it holds them in another type.

    Raises:
        ConfigError: Parquet has no such type.
    """
    kind = next((value.column.type for value in values if type(value) is Cell), None)
    if kind is None:
        return
    found = read_back(held_type(kind))
    if isinstance(found, str):
        raise ConfigError(
            f"cannot keep column {name!r}: Parquet does not have its type, {kind}; write to a .jsonl file, or make "
            "another value of it with a function of your own (``prepare``)"
        )
    if nests_dictionary(kind):
        logger.warning("headrace: column %r is of type %s, whose dictionaries become their values", name, kind)
    elif found != held_type(kind):
        logger.warning("headrace: column %r is of type %s, which Parquet holds as %s", name, kind, found)


def check_text_column(name: str, values: Sequence[object]) -> None:
    """Check the first values of a column for JSON Lines or CSV.

    Raises:
        ConfigError: a text file cannot hold any of them, because of their type.
    """
    json = StrictJson(json_default)
    refused: list[tuple[str, Exception]] = []
    for value in values:
        found = tried(plain, value, f"column {name!r}")  # an object of the user's own may raise anything
        is_plain = not isinstance(found, Exception)
        if found is None:
            continue
        error = tried(json.dump, found) if is_plain else found
        if not isinstance(error, Exception):
            return
        found = found if is_plain else value
        if type(value) is not Cell and not isinstance(found, _NOT_IN_JSON):
            return  # an object of some row: only its record fails
        python = "" if type(found) is Cell else type(found).__name__
        table = str(value.column.type) if type(value) is Cell else ""
        refused.append((f"{python} ({table})" if python and table else python or table, error))
    if not refused:
        return
    kind, reason = refused[0]
    more = "" if isinstance(reason, TypeError) else f" ({reason})"
    raise ConfigError(
        f"cannot keep column {name!r}: a text file cannot hold its values, of type {kind}{more}; "
        "write to a .parquet file, or turn them into text with a function of your own (``prepare``)"
    )
