"""Finds the rows that cannot be written, after writing all of them together has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headrace.errors import JobError, RecordError, attempted, text_of
from headrace.records import Ok

Bad: TypeAlias = list[tuple[Ok, Exception]]


def writable(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Split rows, by halving, into those that can be written together and the others with their errors."""
    good, bad = _each_alone(rows, encode)
    if _error(good, encode) is None:
        return good, bad
    together, more = _add(good, [], encode)  # each of them can be written, and not with the others
    return together, sorted(bad + more, key=lambda one: one[0].record.position)


def _error(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> Exception | None:
    error = attempted(encode, rows)  # a format's library, or an object's own methods, may raise anything
    if isinstance(error, JobError):
        raise error
    if isinstance(error, Exception):
        return error
    if isinstance(error, BaseException):
        return RecordError(f"writing it raised {type(error).__name__}: {text_of(error)}")
    return None


def _each_alone(rows: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Split off the rows that cannot be written even alone."""
    error = _error(rows, encode)
    if error is None:
        return rows, []
    if len(rows) == 1:
        return [], [(rows[0], error)]
    good, bad = _each_alone(rows[: len(rows) // 2], encode)
    more_good, more_bad = _each_alone(rows[len(rows) // 2 :], encode)
    return good + more_good, bad + more_bad


def _add(rows: list[Ok], to: list[Ok], encode: Callable[[list[Ok]], object]) -> tuple[list[Ok], Bad]:
    """Append the rows that can be written together with `to`."""
    error = _error(to + rows, encode)
    if error is None:
        return to + rows, []
    if len(rows) == 1:
        return to, [(rows[0], error)]
    to, bad = _add(rows[: len(rows) // 2], to, encode)
    to, more = _add(rows[len(rows) // 2 :], to, encode)
    return to, bad + more
