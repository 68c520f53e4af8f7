"""`headrace.run` with the kind of a table as its sink returns the finished table."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import ConfigError, JobError, MissingExtraError, TooManyErrorsError

pa: Any = pytest.importorskip("pyarrow")
pd: Any = pytest.importorskip("pandas")
pl: Any = pytest.importorskip("polars")


def lengths(texts: list[Any]) -> list[int]:
    return [len(text) for text in texts]


def run(source: Any, sink: Any, **options: Any) -> Any:
    return headrace.run(source, sink=sink, task="custom", engine=lengths, progress=False, **options)


def test_each_kind_is_of_its_library_and_in_input_order() -> None:
    rows = [{"id": f"r{n}", "text": "x" * (n * 7919 % 60)} for n in range(3000)]
    expected = {"id": [row["id"] for row in rows], "output": [len(row["text"]) for row in rows]}
    frame = run(rows, "pandas")
    assert isinstance(frame, pd.DataFrame) and frame.to_dict("list") == expected
    assert isinstance(found := run(rows, "polars"), pl.DataFrame) and found.to_dict(as_series=False) == expected
    assert isinstance(found := run(rows, "arrow"), pa.Table) and found.to_pydict() == expected


def test_a_result_aligns_with_the_frame_it_is_of() -> None:
    when = pd.to_datetime(["2026-01-02T03:04:05", None, "2026-01-03"], format="ISO8601").tz_localize("Asia/Tokyo")
    kinds = pd.Categorical(["x", None, "y"])
    frame = pd.DataFrame({"text": ["a", "bb", "ccc"], "when": when, "kind": kinds}, index=[7, 5, 6])
    found = run(frame, "pandas", keep_columns=["when", "kind"])
    frame["length"] = found["output"]
    assert frame["length"].tolist() == [1, 2, 3]
    assert found["when"].tolist()[0] == when[0] and str(found["when"].dt.tz) == "Asia/Tokyo"
    assert found["when"].isna().tolist() == found["kind"].isna().tolist() == [False, True, False]
    assert run(frame, "pandas", limit=2).index.tolist() == [7, 5]
    assert run(frame, "pandas", shard=(1, 2)).index.tolist() == [0]


@pytest.mark.parametrize("sink", ["pandas", "polars", "arrow", "numpy", "list", lambda rows: None])
def test_ids_that_come_twice_need_no_other_output_where_none_is_kept(sink: Any) -> None:
    frame = pd.DataFrame({"id": ["a", "b", "a"], "text": ["a", "bb", "ccc"]})
    with pytest.raises(JobError, match=r'records 0 and 2\. [^;]* or give id_column="" to use positions$'):
        run(frame, sink)
    run(frame, sink, id_column="")


def test_values_of_no_column_type_are_texts_or_failures() -> None:
    kept = pd.Series([pd.Period("2026-01"), object(), pd.Interval(0, 1)], dtype=object)
    found = run(pd.DataFrame({"text": ["a", "b", "c"], "kept": kept}), "pandas", keep_columns=["kept"])
    assert found["kept"].tolist()[::2] == ["2026-01", "(0, 1]"]
    assert "column 'kept' is or holds a value of type object, which no format can hold" in found["error"][1]


def test_vectors_are_arrays() -> None:
    found = headrace.run(["a", "b"], sink="pandas", task="embed", engine="headrace.testing:FakeEngine", progress=False)
    assert found["embedding"][0].shape == found["embedding"][1].shape


@pytest.mark.parametrize("ids", [None, ["a", "b", "c", "d"], [1, 2, "x", "y"]], ids=["positions", "texts", "mixed"])
def test_a_failed_record_keeps_its_row_with_its_error(ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": text} | ({"id": ids[n]} if ids else {}) for n, text in enumerate(["a", None, "ccc", None])]
    found = run(rows, "arrow").to_pydict()
    assert found["id"] == [*range(4)] if ids is None else found["id"] == [str(one) for one in ids]
    assert found["output"] == [1, None, 3, None]
    assert found["error"][::2] == [None, None] and found["error"][1].startswith("TypeError: object of type")
    assert "2 of 4 records failed" in caplog.text


def test_a_failed_record_does_not_turn_counts_in_objects_into_floats() -> None:
    def counts(texts: list[Any]) -> list[dict[str, Any]]:
        return [{"tokens": len(text), "vector": np.array([1.0, 2.0], np.float32)} for text in texts]

    rows = [{"text": text} for text in ("a", None, "ccc")]
    found = headrace.run(rows, sink="pandas", task="custom", engine=counts, progress=False)["output"]
    assert [one and type(one["tokens"]) for one in found] == [int, None, int]
    assert found[0]["vector"].dtype == np.float32


def test_an_empty_table_gives_an_empty_table() -> None:
    assert run(pd.DataFrame({"text": []}), "pandas").columns.tolist() == ["id", "output"]


def test_an_error_does_not_promise_that_records_are_kept() -> None:
    with pytest.raises(TooManyErrorsError, match="sink='pandas' keeps nothing; a file would keep finished records"):
        run([{"text": 1}] * 3, "pandas")


def test_what_a_table_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="keep column 'error'"):
        run([{"text": "a", "error": 1}], "arrow", keep_columns=["error"])
    with pytest.raises(ConfigError, match="leave out retry"):
        run(["a"], "arrow", retry=True)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingExtraError, match="needs polars, which is not installed: pip install"):
        run(["a"], "polars")
