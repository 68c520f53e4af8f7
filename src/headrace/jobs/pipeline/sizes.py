"""How many bytes rows, payloads and outputs hold in memory, reckoned cheaply; pure."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Any

from headrace.records import Failed, Ok, Outcome, Record

ROW_BYTES = 1024
"""Of any row: its dict, its keys' values, and what carries it from stage to stage."""
_NUMBER_BYTES = 32
_SAMPLE = (16, 8, 4, 2)
"""Values that are looked into at each level of nesting, evenly spread; the others are taken to be like them."""
_DEEPEST = 64
_PLAIN = (int, float, bool, type(None))


def rows_bytes(records: Sequence[Record], failures: Sequence[Failed] = ()) -> int:
    """What the rows of a chunk hold."""
    total = ROW_BYTES * (len(records) + len(failures))
    for record in records:
        data = record.data
        for value in data.values() if type(data) is dict else (data,):
            kind = type(value)
            if kind is str:
                total += len(value)
            elif kind not in _PLAIN:
                total += value_bytes(value)
    return total + sum([value_bytes(failed.record.data) for failed in failures])


def outputs_bytes(outcomes: Sequence[Outcome]) -> int:
    """What the outputs hold; where the first and the last are numbers, all are taken to be."""
    if outcomes and all(type(end) is Ok and type(end.output) in _PLAIN for end in (outcomes[0], outcomes[-1])):
        return len(outcomes) * _NUMBER_BYTES
    return sum([value_bytes(outcome.output) for outcome in outcomes if type(outcome) is Ok])


def value_bytes(value: Any, level: int = 0) -> int:
    """What one value holds; of a long list or dict some values are looked at."""
    kind = type(value)
    if kind in _PLAIN:
        return _NUMBER_BYTES
    if kind is str or kind is bytes:
        return getsizeof(value)
    if kind is list or kind is tuple:
        return getsizeof(value) + _inner_bytes(value, level)
    if kind is dict:
        return getsizeof(value) + _inner_bytes(list(value.values()), level)
    try:
        return _object_bytes(value, level)
    except BaseException:  # noqa: BLE001 - an object's own attributes may raise anything, and this is an estimate
        return _NUMBER_BYTES


def _object_bytes(value: Any, level: int) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    slots = getattr(value, "__slots__", ())
    parts = [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    parts += getattr(value, "__dict__", {}).values()
    return getsizeof(value, _NUMBER_BYTES) + _inner_bytes(parts, level)


def _inner_bytes(values: Any, level: int) -> int:
    count = len(values)
    if not count or level >= _DEEPEST:
        return count * _NUMBER_BYTES
    if type(values[0]) in _PLAIN and type(values[-1]) in _PLAIN:
        return count * _NUMBER_BYTES
    looked_at = _SAMPLE[level] if level < len(_SAMPLE) else 1
    if count <= looked_at:
        chosen = values
    else:
        step = count / looked_at
        chosen = [values[int(number * step)] for number in range(looked_at)]
    return sum(value_bytes(inner, level + 1) for inner in chosen) * count // len(chosen)
