"""JSON of columns: the same bytes as of their rows, without a call for each row where their types allow it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from headrace.columns import Column, FinishedRows, Outputs
from headrace.extras import lazy
from headrace.io.formats.arrow_memory import content_of, of_pieces, of_text
from headrace.io.formats.cells import exact_values, is_arrow, kept_values
from headrace.io.formats.strict_json import StrictJson
from headrace.io.formats.values import by_key, plain, rows_of_array

if TYPE_CHECKING:
    import numpy
    import orjson
    import pyarrow as pa
    import pyarrow.compute as pc
    from numpy.typing import NDArray
else:
    numpy, orjson, pa, pc = lazy("numpy"), lazy("orjson"), lazy("pyarrow"), lazy("pyarrow.compute")

_ALIKE = (1e-4, 1e16)
"""orjson and Python write the same digits of a float, and from 1e-4 to below 1e16 without an exponent, so alike."""
_NULL = b"null"
_NUMBERS_AT_ONCE = 1 << 14
"""Few enough that all that is made of them stays in the processor's cache."""
_QUOTE, _ESCAPE = b'"\\'
_NUMBERS = frozenset((int, bool, type(None)))
_TEXTS = frozenset((str, type(None)))


class JsonTexts(NamedTuple):
    """A text for each row, of three pieces, of which the first and the last are the same for all rows."""

    before: bytes
    rows: Sequence[bytes] | pa.Array
    """In a list, or an array of `large_binary`."""
    after: bytes


def has_columns() -> bool:
    """Whether what this module needs is installed."""
    return all(find_spec(module) is not None for module in ("orjson", "pyarrow", "numpy"))


def row_columns(
    rows: FinishedRows, output: str, but: Collection[str] = ()
) -> dict[str, tuple[Outputs, Callable[[object], object]]]:
    """The columns of finished rows, in their order, each with what makes its values plain.

    Args:
        output: the name of the column of outputs.
        but: columns to leave out.

    Raises:
        Exception: Python cannot hold a value as it is.
    """
    columns: dict[str, tuple[Outputs, Callable[[object], object]]] = {}
    if "id" not in but:
        columns["id"] = exact_values(rows.ids), lambda one: one
    for name, column in (rows.kept or {}).items():
        if name not in but:
            columns[name] = kept_values(column, typed=rows.typed), functools.partial(plain, name=f"column {name!r}")
    columns[output] = rows.outputs, plain
    return columns


def row_texts(json: StrictJson, rows: FinishedRows, output: str) -> list[JsonTexts]:
    """The JSON objects of finished rows.

    Args:
        json: how to encode; it is for compact JSON.
        rows: in columns, at least one row.

    Raises:
        Exception: a value cannot be written.
    """
    columns = {"id": rows.ids, **(rows.kept or {})}
    simple = {name: found for name, column in columns.items() if (found := _simple_texts(column)) is not None}
    others = {name: column_texts(json, *column) for name, column in row_columns(rows, output, simple).items()}
    return object_texts(json, {name: simple.get(name) or others[name] for name in (*columns, output)})


def _simple_texts(column: Column) -> list[JsonTexts] | None:
    """The JSON of integers, booleans, and of texts without a character that JSON escapes; None for another column."""
    if not is_arrow(column):
        return None
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        texts = column.cast(pa.large_string())
        return [JsonTexts(b"", (texts.fill_null("null") if texts.null_count else texts).view(pa.large_binary()), b"")]
    if column.null_count or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    content, bounds = content_of(texts := column.cast(pa.large_string()))
    codes = numpy.frombuffer(content, numpy.uint8)[bounds[0] : bounds[-1]]
    if len(codes) and (codes.min() < ord(" ") or (codes == _QUOTE).any() or (codes == _ESCAPE).any()):
        return None
    if len(codes) and not codes.max() < 128:
        texts.validate(full=True)
    return [JsonTexts(b'"', texts.view(pa.large_binary()), b'"')]


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
    if array is not None and array.dtype.kind == "f":
        return [JsonTexts(b"", _numbers(json, array[:, None]), b"")]
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


def lines_of_texts(texts: Sequence[JsonTexts], end: bytes) -> memoryview:
    """The texts of all rows, each with `end` after it."""
    columns: list[pa.Array | pa.Scalar] = []
    after = b""
    for text in texts:
        columns += [of_pieces([after + text.before])[0], text.rows if is_arrow(text.rows) else of_pieces(text.rows)]
        after = text.after
    lines = pc.binary_join_element_wise(*columns, of_pieces([after + end])[0], of_pieces([b""])[0])
    content, bounds = content_of(lines)
    return memoryview(content)[bounds[0] : bounds[-1]]


def _strings(values: Sequence[object]) -> list[bytes]:
    # JSON escapes the newlines of a text, so that all others are those of the indentation.
    return orjson.dumps(values, option=orjson.OPT_INDENT_2)[4:-2].split(b",\n  ")


def _numbers(json: StrictJson, vectors: NDArray[numpy.generic]) -> pa.Array:
    """The numbers of each vector as compact JSON, without brackets, with floats as Python writes them."""
    step = max(1, _NUMBERS_AT_ONCE // max(1, vectors.shape[1]))
    parts = [vectors[start : start + step] for start in range(0, len(vectors), step)]
    write = functools.partial(_floats, json) if vectors.dtype.kind == "f" else _written
    return pa.concat_arrays([write(part) for part in parts])


def _written(vectors: NDArray[numpy.generic]) -> pa.Array:
    """As orjson writes them. It writes the numbers of all vectors as one list in half the time of a list of lists."""
    count, width = vectors.shape
    if not width:
        return of_pieces([b""] * count)
    text = orjson.dumps(numpy.ascontiguousarray(vectors).reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY)
    commas = numpy.flatnonzero(numpy.frombuffer(text, numpy.uint8) == ord(","))[width - 1 :: width]
    # A comma or a bracket is behind the numbers of each.
    return pc.binary_slice(of_text(text, numpy.concatenate(([1], commas + 1, [len(text)]))), 0, -1)


def _floats(json: StrictJson, vectors: NDArray[numpy.generic]) -> pa.Array:
    floats = vectors.astype(numpy.float64, order="C")
    sizes = numpy.abs(floats)
    odd = ((sizes < _ALIKE[0]) & (sizes != 0)) | ~(sizes < _ALIKE[1])
    if not odd.any():
        return _written(floats)
    texts = [repr(one).encode() if math.isfinite(one) else _NULL for one in floats[odd].tolist()]
    json.count_nulled(texts.count(_NULL))
    floats[odd] = numpy.nan  # which orjson writes as null
    rows, others = _written(floats).to_pylist(), iter(texts)
    for row in numpy.flatnonzero(odd.any(axis=1)).tolist():
        first, *more = rows[row].split(b"n")
        rows[row] = b"".join([first, *(part for after in more for part in (next(others), after[3:]))])
    return of_pieces(rows)
