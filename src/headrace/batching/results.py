"""What a function or engine returned: checked, and copied where it could still change. See docs/engines.md."""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import sys
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence, Set, Sized
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

from headrace.batching.callables import unfinished
from headrace.batching.foreign_calls import Raised, attempt
from headrace.device_errors import is_out_of_memory
from headrace.errors import BadResultError, text_of

T = TypeVar("T")

Owned: TypeAlias = Any
"""An object that is copied as what it is or looks like."""
Copier: TypeAlias = Callable[[Owned], object]
"""Copies objects of a type, or of those that look like it."""

_PLAIN = frozenset((str, int, float, bool, bytes, complex, type(None)))
"""Types whose objects never change."""
_TYPES_KNOWN = 512
_SHALLOW = frozenset(("pandas", "polars", "pyarrow"))
"""Libraries whose own copies share memory that is not theirs, or the objects in it."""


def received(results: object, size: int, name: str = "process_fn", *, whole: bool = False) -> Sequence[object]:
    """`checked_results`, each as `own` gives it, so that the function may fill the same objects again.

    A result that cannot be copied becomes the BadResultError of its record. With `whole`, the copy of a NumPy array of
    numbers stays an array; anything else becomes a list.
    """
    if _is_array_of_numbers(results):  # one copy for all rows
        copied = own_result(results, name)
        if isinstance(copied, BadResultError):
            raise copied
        if whole and _is_numpy(copied) and len(copied) == size:
            return copied
        return checked_results(copied, size, name)
    values = checked_results(results, size, name)
    if _PLAIN.issuperset(map(type, values)):
        return list(values) if values is results else values
    return [value if type(value) in _PLAIN else own_result(value, name) for value in values]


def checked(results: object, size: int, name: str) -> Sequence[object]:
    """`checked_results`, but an array of numbers stays one, so that `received` copies it at once."""
    whole = _is_array_of_numbers(results) and _count(results, size, name) == size
    return cast("Sequence[object]", results) if whole else checked_results(results, size, name)


def checked_results(results: object, size: int, name: str = "process_fn") -> list[object]:
    """The `size` results of the function `name` (a list, tuple, array, tensor or series) as a list.

    Raises:
        BadResultError: wrong type or count; the message names the type and both counts.
    """
    if type(results) is list:
        given: list[object] = results
        count = len(given)
    else:
        unfinished(name, results)  # closes a coroutine
        count = _count(results, size, name)
        given = []
        if count == size:
            rows = attempt(_first, results, size + 1)
            if isinstance(rows, Raised):
                raise _refused(results, size, name, _failure(rows.cause)) from rows.cause
            given, count = rows, len(rows)
    if count != size:
        shape = "" if type(results) in (list, tuple) else f" ({_named(results)})"
        raise BadResultError(
            f"{name} returned {count} results for batch of {size} records{shape}: "
            "return one per record, in the order of the batch; put an exception in the place of one that failed"
        )
    return given


def own(value: T) -> T:
    """The value as nobody else can change it.

    Arrays, tensors, tables and images are copied, and so are bytearrays, memoryviews, lists, dicts and other mappings,
    sets, tuples and dataclasses with what is in them. Objects of other classes are passed on as they are.

    Raises:
        Exception: it cannot be copied.
    """
    return value if type(value) in _PLAIN else cast("T", _copier(type(value))(value))


def own_result(value: object, name: str) -> object:
    """`own`, or the BadResultError of the record if the result of the function `name` cannot be copied."""
    try:  # here and not in a function: it runs for every record
        return _copier(type(value))(value)
    except Exception as error:  # noqa: BLE001 - copying calls methods of the user's classes; only the record fails
        words = _failure(error)
    return BadResultError(f"{name} returned a result of type {type(value).__name__} that cannot be copied: {words}")


def _count(results: object, size: int, name: str) -> int:
    if isinstance(results, (str, bytes, bytearray, memoryview, Mapping, Set)):
        raise _refused(results, size, name)
    if hasattr(type(results), "columns") or hasattr(type(results), "column_names"):
        raise _refused(results, size, name, "a table; return its rows, such as to_dict('records') or to_pylist()")
    count = attempt(len, cast("Sized", results))
    if isinstance(count, Raised):  # a single value, something lazy, or a __len__ of the user's that raises
        raise _refused(results, size, name) from count.cause
    return count


def _first(results: object, most: int) -> list[object]:
    """The first results, at most `most`: some never end. Iterated, because some index by label."""
    to_pylist = getattr(results, "to_pylist", None)  # of Arrow
    values = results if to_pylist is None else to_pylist()
    return list(itertools.islice(cast("Iterable[object]", values), most))


def _failure(error: BaseException) -> str:
    """What a method of the user's classes raised, in words; raised again if it is no failure of the results."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {text_of(error)}"


def _refused(results: object, size: int, name: str, why: str = "") -> BadResultError:
    return BadResultError(
        f"{name} returned {_named(results)} for batch of {size} records{f' ({why})' if why else ''}: "
        "return a list with one result per record, in the order of the batch"
    )


def _named(results: object) -> str:
    kind = type(results).__name__
    shape = attempt(getattr, results, "shape", None)  # a nested tensor raises
    return f"{kind} of shape {tuple(shape)}" if isinstance(shape, tuple) else kind


def _is_array(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("shape", "__array__", "__array_interface__"))


def _find_copier(kind: type) -> Copier:
    """The copier of a type; `_as_is` for one that is not copied."""
    for base, copier in _COPIERS.items():
        if issubclass(kind, base):
            return copier if kind is base else _SUBCLASSES.get(base, copier)
    if _SHALLOW & {base.__module__.partition(".")[0] for base in kind.__mro__}:
        return _own_scalar if hasattr(kind, "as_py") else _own_column if _is_array(kind) else _as_is
    if _is_array(kind):
        method = getattr(kind, "clone", None) or getattr(kind, "copy", None)
        return functools.partial(_own_array, method=method) if callable(method) else _as_is
    if issubclass(kind, Mapping):
        return copy.deepcopy
    return _own_dataclass if dataclasses.is_dataclass(kind) else _as_is


def _as_is(value: object) -> object:
    return value


def _is_numpy(values: object) -> TypeGuard[Sequence[object]]:
    """Whether this is a NumPy array, and of no subclass, whose parts may differ from its rows."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(values) is numpy.ndarray


def _is_array_of_numbers(values: object) -> bool:
    """Whether one copy of an array or tensor copies all of its rows."""
    is_array = getattr(_copier(type(values)), "func", None) is _own_array and getattr(values, "ndim", 0) > 0
    return is_array and not _holds_objects(values)


def _holds_objects(values: object) -> bool:
    return bool(getattr(getattr(values, "dtype", None), "hasobject", False))


def _own_array(values: object, method: Copier) -> object:
    if _holds_objects(values):
        return copy.deepcopy(values)
    return method(values)


def _own_column(values: Owned) -> object:
    """A column or value of a library that copies nothing but its own memory."""
    dtype = str(getattr(values, "dtype", ""))
    if dtype == "Object":  # of polars
        return type(values)(values.name, list(map(own, values)), values.dtype)
    if dtype == "object" and hasattr(values, "index"):  # of pandas
        return type(values)(list(map(own, values)), values.index, values.dtype, values.name)
    if hasattr(values, "get_total_buffer_size") and values.get_total_buffer_size() > values.nbytes:
        with contextlib.suppress(NotImplementedError):  # a type without this function, such as a string view
            values = values.take(list(range(len(values))))  # a part of a column, without the rest of it
    return pickle.loads(pickle.dumps(values, pickle.HIGHEST_PROTOCOL))


def _own_scalar(value: Owned) -> object:
    """A scalar of Arrow, such as a list, which is a part of an array. Pickle would cut its times to microseconds."""
    return sys.modules["pyarrow"].array([value], value.type)[0]


def _own_list(values: list[object]) -> list[object]:
    return values.copy() if _PLAIN.issuperset(map(type, values)) else list(map(own, values))


def _own_tuple(values: tuple[object, ...]) -> tuple[object, ...]:
    return values if _PLAIN.issuperset(map(type, values)) else tuple(map(own, values))


def _own_other_tuple(values: tuple[object, ...]) -> object:
    if _PLAIN.issuperset(map(type, values)):
        return values
    made: Copier = getattr(type(values), "_make", type(values))
    return made(map(own, values))


def _own_dict(values: dict[object, object]) -> dict[object, object]:
    return {key: value if type(value) in _PLAIN else own(value) for key, value in values.items()}


def _own_view_of_dict(values: Owned) -> object:
    return type(values)(_own_dict(values))


def _own_mapping(values: MutableMapping[object, object]) -> object:
    made = copy.copy(values)
    for key, value in values.items():
        made[key] = own(value)
    return made


def _own_sequence(values: MutableSequence[object]) -> object:
    made = copy.copy(values)
    for place, value in enumerate(values):
        made[place] = own(value)
    return made


def _own_view(view: memoryview[object]) -> memoryview[object]:
    made: memoryview[object] = memoryview(view.tobytes()).cast(view.format, view.shape)  # type: ignore[call-overload]
    return made


def _own_dataclass(value: Owned) -> object:
    made = value
    for field in dataclasses.fields(value):
        mine = getattr(value, field.name, None)
        if (copied := own(mine)) is not mine:
            made = copy.copy(value) if made is value else made
            object.__setattr__(made, field.name, copied)
    return made


_COPIERS: dict[type, Copier] = {
    dict: _own_dict,
    list: _own_list,
    tuple: _own_tuple,
    set: copy.copy,
    bytearray: copy.copy,
    array.array: copy.copy,
    memoryview: _own_view,
    deque: _own_sequence,
    UserDict: _own_mapping,
    ChainMap: _own_view_of_dict,
    MappingProxyType: _own_view_of_dict,
    UserList: _own_sequence,
}
_SUBCLASSES: dict[type, Copier] = {dict: _own_mapping, list: _own_sequence, tuple: _own_other_tuple}
_copier: Callable[[type], Copier] = functools.lru_cache(_TYPES_KNOWN)(_find_copier)
"""The function that copies objects of a type."""
