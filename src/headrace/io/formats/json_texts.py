"""JSON of columns: the same bytes as of their rows, without a call for each row where their types allow it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.columns import FinishedRows, Outputs
from headrace.io.formats.cells import exact_values, kept_values
from headrace.io.formats.strict_json import StrictJson
from headrace.io.formats.values import by_key, plain, rows_of_array

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ALIKE = (1e-4, 1e16)
"""orjson and Python write the same digits of a float, and from 1e-4 to below 1e16 without an exponent, so alike."""
_NULL = b"null"
_NUMBERS_AT_ONCE = 1 << 14
"""Few enough that all that is made of them stays in the processor's cache."""
_NUMBERS = frozenset((int, bool, type(None)))
_TEXTS = frozenset((str, type(None)))


class JsonTexts(NamedTuple):
    """A text for each row, of three pieces, of which the first and the last are the same for all rows."""

    before: bytes
    rows: Sequence[bytes]
    after: bytes


def has_columns() -> bool:
    """Whether what this module needs is installed."""
    try:
        import orjson  # noqa: F401
    except ImportError:
        return False
    return True


def row_columns(rows: FinishedRows, output: str) -> dict[str, tuple[Outputs, Callable[[object], object]]]:
    """The columns of finished rows, in their order, each with what makes its values plain.

    Args:
        rows: in columns.
        output: the name of the column of outputs.

    Raises:
        Exception: Python cannot hold a value as it is.
    """
    columns: dict[str, tuple[Outputs, Callable[[object], object]]] = {"id": (exact_values(rows.ids), lambda one: one)}
    for name, column in (rows.kept or {}).items():
        columns[name] = kept_values(column, typed=rows.typed), functools.partial(plain, name=f"column {name!r}")
    columns[output] = rows.outputs, plain
    return columns


def column_texts(json: StrictJson, values: Outputs, as_plain: Callable[[object], object]) -> list[JsonTexts]:
    """The JSON of each value of a column: the texts of a row follow one another.

    Args:
        json: how to encode; it is for compact JSON.
        values: at least one, in an array of NumPy or a list.
        as_plain: makes a value plain.

    Raises:
        Exception: a value cannot be written.
    """
    array = rows_of_array(values)
    if array is not None and array.ndim == 2:
        return [JsonTexts(b"[", _numbers(json, array), b"]")]
    values = list(values) if array is None else array.tolist()
    types = set(map(type, values))
    if types <= _NUMBERS:
        return [JsonTexts(b"", json.encode(values)[1:-1].encode().split(b","), b"")]
    if types == {float}:
        import numpy

        return [JsonTexts(b"", _numbers(json, numpy.array(values)[:, None]), b"")]
    if types <= _TEXTS:
        return [JsonTexts(b"", _strings(values), b"")]
    if (columns := by_key(values)) is not None:
        return object_texts(json, {key: column_texts(json, inner, as_plain) for key, inner in columns.items()})
    return [JsonTexts(b"", [json.dump(as_plain(value)).encode() for value in values], b"")]


def object_texts(json: StrictJson, fields: Mapping[str, Sequence[JsonTexts]]) -> list[JsonTexts]:
    """The JSON objects of rows, from the texts of their values by key."""
    texts: list[JsonTexts] = []
    opening, (*_, last) = "{", fields
    for key, found in fields.items():
        start = f"{opening}{json.encode(key)}:".encode()
        end = b"}" if key is last else b""
        inner = list(found)
        inner[0] = inner[0]._replace(before=start + inner[0].before)
        inner[-1] = inner[-1]._replace(after=inner[-1].after + end)
        texts += inner
        opening = ","
    return texts


def pieces_of(texts: Sequence[JsonTexts], end: bytes) -> Iterator[bytes]:
    """The texts of all rows, each with `end` after it, in pieces."""
    columns: list[Iterable[bytes]] = []
    after = b""
    for text in texts:
        columns += [itertools.repeat(after + text.before, len(texts[0].rows)), text.rows]
        after = text.after
    columns.append(itertools.repeat(after + end, len(texts[0].rows)))
    return itertools.chain.from_iterable(zip(*columns, strict=True))


def _strings(values: Sequence[object]) -> list[bytes]:
    """Texts and nulls as JSON."""
    import orjson

    # JSON escapes the newlines of a text, so that all others are those of the indentation.
    return orjson.dumps(values, option=orjson.OPT_INDENT_2)[4:-2].split(b",\n  ")


def _numbers(json: StrictJson, vectors: NDArray[numpy.generic]) -> list[bytes]:
    """The numbers of each vector as compact JSON, without brackets, with floats as Python writes them."""
    step = max(1, _NUMBERS_AT_ONCE // max(1, vectors.shape[1]))
    parts = [vectors[start : start + step] for start in range(0, len(vectors), step)]
    if vectors.dtype.kind != "f":
        return [row for part in parts for row in _written(part)]
    return [row for part in parts for row in _floats(json, part)]


def _written(vectors: NDArray[numpy.generic]) -> list[bytes]:
    """As orjson writes them."""
    import numpy
    import orjson

    text = orjson.dumps(numpy.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY)
    return [row[:-2] for row in text[2:].split(b"[")]  # one byte is found ten times faster than three


def _floats(json: StrictJson, vectors: NDArray[numpy.generic]) -> list[bytes]:
    import numpy

    floats = vectors.astype(numpy.float64, order="C")
    sizes = numpy.abs(floats)
    odd = ((sizes < _ALIKE[0]) & (sizes != 0)) | ~(sizes < _ALIKE[1])
    if not odd.any():
        return _written(floats)
    texts = [repr(one).encode() if math.isfinite(one) else _NULL for one in floats[odd].tolist()]
    json.count_nulled(texts.count(_NULL))
    floats[odd] = numpy.nan  # which orjson writes as null
    rows, others = _written(floats), iter(texts)
    for row in numpy.flatnonzero(odd.any(axis=1)).tolist():
        first, *more = rows[row].split(b"n")
        rows[row] = b"".join([first, *(part for after in more for part in (next(others), after[3:]))])
    return rows
