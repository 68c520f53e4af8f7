"""Hostile tables in memory, by name: each type of three libraries as a column that is kept, as text and as id."""

from __future__ import annotations

import datetime
import decimal
import functools
from collections.abc import Callable, Mapping
from typing import Any

ROWS = 1400
LATE = 900
"""The row of an odd value: the first slices of such a table have none."""
Make = Callable[[], Any]


def usual() -> dict[str, list[Any]]:
    """The other columns: some texts are empty, and some fail."""
    texts = [f"poison {n}" if n % 450 == 7 else "" if n % 300 == 9 else f"text {n}" for n in range(ROWS)]
    return {"id": [3 * n for n in range(ROWS)], "text": texts, "k": list(range(ROWS))}


def in_arrow(values: Any, place: str = "k", rows: int = 97) -> Any:
    """An Arrow table of many chunks, one of whose columns has these four values again and again."""
    import pyarrow as pa

    column = pa.chunked_array([values] * (ROWS // len(values)))
    table = pa.table({name: column if name == place else given for name, given in usual().items()})
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows)) if rows else table


def in_polars(values: Any, place: str = "k") -> Any:
    """The same as a DataFrame of polars."""
    import polars

    return polars.from_arrow(in_arrow(values, place, 0))


def in_pandas(values: Any, place: str = "k") -> Any:
    """The same as a DataFrame of pandas, with its own types."""
    return in_arrow(values, place).to_pandas()


def of_arrow(values: Any, place: str = "k") -> Any:
    """The same as a DataFrame of pandas with the types of Arrow."""
    import pandas as pd

    return in_arrow(values, place).to_pandas(types_mapper=pd.ArrowDtype)


def frame(values: Callable[[], Any], place: str = "k") -> Any:
    """A DataFrame of pandas with these values in a column, each for several rows if they are few."""
    import pandas as pd

    column = values()
    column = (
        column if len(column) == ROWS else pd.concat([pd.Series(column)] * (ROWS // len(column)), ignore_index=True)
    )
    return pd.DataFrame(usual() | {place: column})


def late(odd: Any, otherwise: Callable[[int], Any] = "t {}".format) -> Callable[[], Any]:
    """Objects of which one is odd."""

    def made() -> Any:
        import pandas as pd

        return pd.Series([odd if n == LATE else otherwise(n) for n in range(ROWS)], dtype=object)

    return made


class OwnText(str):
    """A text of a class of its own."""

    __slots__ = ()


def objects() -> dict[str, Callable[[], Any]]:
    """Columns of Python objects in pandas, most of texts but one."""
    import numpy as np
    import pandas as pd

    odd = {
        "none": None, "nan": float("nan"), "na": pd.NA, "nat": pd.NaT, "integer": 7, "huge": 10**30, "float": 1.5,
        "true": True, "bytes": b"\xff", "bytes-of-text": b"abc", "surrogate": "a\ud800", "nul": "a\0b",
        "letters": "äß😀", "own-text": OwnText("own"),
        "numpy-text": np.str_("numpy"), "numpy-integer": np.int64(7), "list": [1, "a"],
        "dict": {"a": {"b": 1}}, "array": np.array([1.5, 2]), "date": datetime.date(2020, 1, 2),
        "moment": datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC), "timestamp": pd.Timestamp(1234567890123456789),
        "timedelta": pd.Timedelta(5), "decimal": decimal.Decimal("1.50"), "decimal-nan": decimal.Decimal("nan"),
        "set": {1}, "object": pd.Interval(1, 2), "long": "x" * 300_000, "tuple": (1, 2), "complex": 1j,
    }  # fmt: skip
    found: dict[str, Callable[[], Any]] = {f"texts-but-{name}": late(value) for name, value in odd.items()}
    of_integers = {"none": None, "nan": float("nan"), "true": True, "huge": 2**63, "numpy": np.int64(1), "text": "x"}
    found |= {f"integers-but-{name}": late(value, int) for name, value in of_integers.items()}
    alike = {
        "texts": "t {}".format, "integers": int, "floats": float, "bools": lambda n: n % 2 == 0,
        "nones": lambda n: None,
        "vectors": lambda n: np.array([n, 1], np.float32), "lists": lambda n: [n], "dicts": lambda n: {"a": n},
        "dates": lambda n: datetime.date(2020, 1, 1) + datetime.timedelta(n), "nans": lambda n: float("nan"),
        "texts-late": lambda n: None if n < LATE else "t", "integers-late": lambda n: None if n < LATE else n,
        "texts-then-integers": lambda n: "t" if n < LATE else n,
        "integers-then-texts": lambda n: n if n < LATE else "t",
        "long-texts": lambda n: f"{n} " * 700, "bytes": lambda n: b"%d" % n,
    }  # fmt: skip
    return found | {f"objects-{name}": late(make(LATE), make) for name, make in alike.items()}


def typed() -> dict[str, Callable[[], Any]]:
    """Columns of pandas of a type of its own, four values again and again or one for each row."""
    import numpy as np
    import pandas as pd

    moments = pd.to_datetime(["2026-01-02T03:04:05.123456789", None, "1700-01-01", "2026-01-02"], format="ISO8601")
    return {
        "str": lambda: pd.array(["a", None, "ä", ""], dtype="str"),
        "str-nulls": lambda: pd.array([None] * 4, dtype="str"),
        "str-late": lambda: pd.Series([None if n < LATE else f"t {n}" for n in range(ROWS)], dtype="str"),
        "str-ids": lambda: pd.Series([f"r {n}" for n in range(ROWS)], dtype="str"),
        "string": lambda: pd.array(["a", pd.NA, "ä", ""], dtype="string"),
        "string-python": lambda: pd.array(["a", pd.NA, "ä", ""], dtype="string[python]"),
        "string-ids": lambda: pd.Series([f"r {n}" for n in range(ROWS)], dtype="string"),
        "Int64": lambda: pd.array([1, pd.NA, -5, 2**62], dtype="Int64"),
        "UInt8": lambda: pd.array([1, pd.NA, 5, 255], dtype="UInt8"),
        "uint64": lambda: np.array([1, 2**64 - 1, 2**63, 0], np.uint64),
        "int8-ids": lambda: np.arange(ROWS, dtype=np.int8),
        "int16-ids": lambda: np.arange(ROWS, dtype=np.int16),
        "uint64-ids": lambda: np.arange(2**64 - ROWS, 2**64 - 1, dtype=np.uint64)[:ROWS].repeat(2)[:ROWS],
        "float16": lambda: np.array([1.5, np.nan, -0.0, np.inf], np.float16),
        "float32": lambda: np.array([0.1, np.nan, -0.0, np.inf], np.float32),
        "float64": lambda: np.array([0.1, np.nan, -0.0, -np.inf]),
        "Float32": lambda: pd.array([0.1, pd.NA, -0.0, np.inf], dtype="Float32"),
        "bool": lambda: np.array([True, False, True, False]),
        "boolean": lambda: pd.array([True, pd.NA, True, False], dtype="boolean"),
        "category": lambda: pd.Categorical(["b", None, "a", "b"]),
        "category-ordered": lambda: pd.Categorical(["b", "a", "a", "b"], ["b", "a", "c"], ordered=True),
        "category-integers": lambda: pd.Categorical([5, None, 7, 5]),
        "category-mixed": lambda: pd.Categorical([5, None, "a", 1.5]),
        "category-moments": lambda: pd.Categorical(moments),
        "moments": lambda: moments,
        "moments-s": lambda: moments.as_unit("s"),
        "moments-utc": lambda: moments.tz_localize("UTC"),
        "moments-tokyo": lambda: moments.tz_localize("Asia/Tokyo"),
        "durations": lambda: pd.to_timedelta([1, None, -5, 86_400_000_000_001]),
        "periods": lambda: pd.PeriodIndex(["2020-01", None, "2020-03", "2021-01"], freq="M"),
        "intervals": lambda: pd.arrays.IntervalArray.from_tuples([(0, 1), None, (1, 2), (3, 5)]),
        "sparse": lambda: pd.arrays.SparseArray([0.0, 1.0, 0.0, np.nan]),
        "sparse-integers": lambda: pd.arrays.SparseArray([0, 1, 0, 0]),
        "complex": lambda: np.array([1j, 2, 3, 4]),
    }


def of_polars() -> dict[str, Callable[[], Any]]:
    """Columns of polars of types that come from no table of Arrow."""
    import polars as pl

    return {
        "categorical": lambda: pl.Series(["a", None, "b", "a"], dtype=pl.Categorical),
        "enum": lambda: pl.Series(["a", None, "b", "a"], dtype=pl.Enum(["b", "a", "c"])),
        "time": lambda: pl.Series([1001, None, 0, 1000]).cast(pl.Time),
        "int128": lambda: pl.Series([1, None, 2**100, 0], dtype=pl.Int128),
        "decimal": lambda: pl.Series([decimal.Decimal("1.50"), None, decimal.Decimal(-1), decimal.Decimal(0)]),
        "array": lambda: pl.Series([[1, 2], None, [3, 4], [5, None]], dtype=pl.Array(pl.Int16, 2)),
        "struct": lambda: pl.Series([{"a": 1, "b": [1]}, None, {"a": None, "b": []}, {"a": 2, "b": None}]),
        "null": lambda: pl.Series([None] * 4),
        "nan": lambda: pl.Series([float("nan"), None, 1.5, -0.0]),
        "binary": lambda: pl.Series([b"a", None, b"\xff", b""]),
        "list-of-text": lambda: pl.Series([["a"], None, [], [None]]),
        "moment-ns": lambda: pl.Series([1, None, 1234567890123456789, 0]).cast(pl.Datetime("ns", "Asia/Tokyo")),
        "moment-ms-far": lambda: pl.Series([1, None, 10**17, 0]).cast(pl.Datetime("ms")),
        "text-ids": lambda: pl.Series([f"r {n}" for n in range(ROWS)]),
        "uint8-ids": lambda: pl.Series(range(ROWS)).cast(pl.UInt8, wrap_numerical=True),
    }


def polars_frame(values: Callable[[], Any], place: str = "k") -> Any:
    """A DataFrame of polars of two chunks with these values in a column."""
    import polars as pl

    column = values()
    column = column if len(column) == ROWS else pl.concat([column] * (ROWS // len(column)), rechunk=False)
    made = pl.DataFrame(usual()).with_columns(column.alias(place))
    return pl.concat([made[:700], made[700:]], rechunk=False)


def whole() -> dict[str, Make]:
    """Tables that are odd as a whole, and streams."""
    import numpy as np
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    import pyarrow.dataset as ds

    plain = usual()
    table = functools.partial(pa.table, plain)
    nested = {**plain, "k": [{"a": {"b": n}} if n % 3 else None for n in range(ROWS)]}

    def indexed(*names: str) -> Any:
        return pd.DataFrame(plain | {"x": 1}).set_index(list(names))

    def sorted_away() -> Any:
        return pd.DataFrame(plain).sort_values("k", ascending=False).iloc[::2]

    def odd_object() -> Any:
        moments = pl.Series([1234567890123456789] * ROWS).cast(pl.Datetime("ns"))
        odd = pl.Series("o", [object] * ROWS, dtype=pl.Object)
        return pl.DataFrame({"id": plain["id"], "text": list(map(str, plain["id"])), "k": moments}).with_columns(odd)

    def not_utf_8() -> Any:
        data = b"".join(b"\xff" if n == LATE else b"a" for n in range(ROWS))
        ends = np.arange(ROWS + 1, dtype="i4")
        texts = pa.Array.from_buffers(pa.string(), ROWS, [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(data)])
        return pa.table(plain | {"text": texts})

    def dictionaries() -> Any:
        parts = [pa.table({**{n: v[:7] for n, v in plain.items()}, "k": pa.array(list(w)).dictionary_encode()})
                 for w in ("abcabca", "xyzxyzx")]  # fmt: skip
        return pa.concat_tables([parts[0], parts[1].set_column(0, "id", pa.array(range(100, 107)))])

    def raising() -> Any:
        def batches() -> Any:
            yield from table().to_batches(max_chunksize=300)[:3]
            raise RuntimeError("no more")

        return pa.RecordBatchReader.from_batches(table().schema, batches())

    def dataset() -> Any:
        import datasets

        return datasets.Dataset.from_dict(plain)

    doubled = {**plain, "id": [5 if n == LATE else n for n in range(ROWS)]}
    return {
        "arrow/plain": table,
        "arrow/batch": lambda: pa.record_batch(plain),
        "arrow/sliced": lambda: table().slice(77, 1111),
        "arrow/chunks-of-one": lambda: pa.Table.from_batches(table()[:200].to_batches(max_chunksize=1)),
        "arrow/no-rows": lambda: table()[:0],
        "arrow/no-columns": lambda: pa.table({}),
        "arrow/doubled-ids": lambda: pa.table(doubled),
        "arrow/null-ids": lambda: pa.table({**plain, "id": [None if n == LATE else n for n in range(ROWS)]}),
        "arrow/not-utf-8": not_utf_8,
        "arrow/dictionaries": dictionaries,
        "arrow/nested": lambda: pa.table(nested),
        "arrow/odd-names": lambda: pa.table(plain | {"": plain["k"], "k.a": plain["k"], "ä\n": plain["k"]}),
        "arrow/no-text": lambda: pa.table({"id": [1], "k": [2]}),
        "arrow/no-id": lambda: table().drop_columns(["id"]),
        "arrow/reader": lambda: table().to_reader(max_chunksize=300),
        "arrow/reader-of-small": lambda: table().to_reader(max_chunksize=5),
        "arrow/reader-raising": raising,
        "arrow/dataset": lambda: ds.dataset(table()),
        "datasets/plain": dataset,
        "datasets/shuffled": lambda: dataset().shuffle(7).select(range(1000)),
        "arrow/array": lambda: pa.chunked_array([plain["text"][:600], plain["text"][600:]]),
        "arrow/array-with-nulls": lambda: pa.array([None if n == LATE else f"t {n}" for n in range(ROWS)]),
        "arrow/array-of-integers": lambda: pa.array(range(ROWS)),
        "arrow/array-of-lists": lambda: pa.array([[1.5, n] for n in range(ROWS)]),
        "polars/plain": lambda: pl.DataFrame(plain),
        "polars/lazy": lambda: pl.LazyFrame(plain),
        "polars/lazy-object": lambda: odd_object().lazy(),
        "polars/object-beside": odd_object,
        "polars/nested": lambda: pl.DataFrame(nested),
        "polars/series": lambda: pl.Series(plain["text"]),
        "polars/series-with-nulls": lambda: pl.Series([None if n == LATE else f"t {n}" for n in range(ROWS)]),
        "polars/doubled-ids": lambda: pl.DataFrame(doubled),
        "pandas/plain": lambda: pd.DataFrame(plain),
        "pandas/index": lambda: indexed("id"),
        "pandas/indexes": lambda: indexed("k", "text"),
        "pandas/index-of-text": lambda: indexed("text"),
        "pandas/sorted-away": sorted_away,
        "pandas/doubled-index": lambda: pd.DataFrame(plain, index=[0] * ROWS),
        "pandas/doubled-ids": lambda: pd.DataFrame(doubled),
        "pandas/text-ids-doubled": lambda: pd.DataFrame({**plain, "id": [f"r{n}" for n in doubled["id"]]}),
        "pandas/nested": lambda: pd.DataFrame(nested),
        "pandas/series": lambda: pd.Series(plain["text"]),
        "pandas/series-of-objects": late(None),
        "pandas/series-of-integers": lambda: pd.Series(range(ROWS)),
        "pandas/no-columns": lambda: pd.DataFrame(index=range(3)),
        "pandas/columns-of-integers": lambda: pd.DataFrame([["a", "b"]]),
        "pandas/empty": lambda: pd.DataFrame(plain)[:0],
    }  # fmt: skip


def tables(types: Mapping[str, Any]) -> dict[str, Make]:
    """All tables; `types` are arrays of Arrow of four values."""
    found: dict[str, Make] = {f"table/{name}": make for name, make in whole().items()}
    columns: dict[str, Callable[[str], Any]] = {}
    for library, in_memory in {
        "arrow": in_arrow, "polars": in_polars, "pandas": in_pandas, "pandas-of-arrow": of_arrow,
    }.items():  # fmt: skip
        known = {
            name: values for name, values in types.items() if (library, name) != ("polars", "decimal256")
        }  # aborts
        columns |= {f"{library}/{name}": functools.partial(in_memory, values) for name, values in known.items()}
    columns |= {f"pandas/{name}": functools.partial(frame, make) for name, make in (objects() | typed()).items()}
    columns |= {f"polars/{name}-of-polars": functools.partial(polars_frame, make) for name, make in of_polars().items()}
    for name, make in columns.items():
        for place in ("k", "text", "id"):
            found[f"table/{name}-as-{place}"] = functools.partial(make, place)  # type: ignore[call-arg]
    return found
