"""The contract of every table that a job can write: see `headrace.io.sinks.tables.TableStore`."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from tests.stores import Store, store

from headrace.errors import BrokenOffError, ConfigError, HeadraceError
from headrace.io.formats.strict_json import StrictJson
from headrace.io.formats.writer import Layout
from headrace.io.sinks.tables import TableSink
from headrace.io.sinks.targets import find_target
from headrace.io.storage.addresses import parse_table
from headrace.plugins import load
from headrace.records import Ok, Record
from headrace.testing import check_table_store

__all__ = ["store"]

HOSTILE = ("select", 'a"b', "x'; DROP TABLE t; --", "Ünï cödé", "CamelCase", "a.b", "%s", "a:b(c)", " x ")
COLUMNS = ("id", "kept", "embedding")


def opened(store: Store, table: str = "rows") -> Any:
    sink = load("sinks", store.name, TableSink)
    return sink.open(parse_table(store.address(table), sink.word), StrictJson(str))


def row(number: Any, vector: Any = (1.0, 0.0, 0.0), kept: Any = "a") -> dict[str, Any]:
    return {"id": number, "kept": kept, "embedding": list(vector) if isinstance(vector, tuple) else vector}


def by_id(store: Store, table: str = "rows") -> dict[Any, Any]:
    rows = store.read(table)
    found = {one["id"]: one["kept"] for one in rows}
    assert len(found) == len(rows), "an id has two rows"
    return found


def test_rows_are_put_once_each_and_replaced(store: Store) -> None:
    table = opened(store)
    if store.name != "postgresql":  # whose server serves all tests
        assert table.count(COLUMNS) is None
    table.put([row("r1"), row("r2")])
    table.put([row("r2", kept="b"), row("r3")])
    assert table.count(COLUMNS)
    table.close()
    assert by_id(store) == {"r1": "a", "r2": "b", "r3": "a"}
    again = opened(store)  # as after a kill
    again.put([row("r2", kept="c"), row("r3", kept="c")])
    again.close()
    assert by_id(store) == {"r1": "a", "r2": "c", "r3": "c"}


def test_the_public_contract_is_kept(store: Store) -> None:
    if store.name == "postgresql":
        pytest.skip("its server serves all tests, whose tables stay")
    check_table_store(
        lambda: opened(store, "public"), lambda: [one | {"text": one["text"]} for one in store.read("public")]
    )


@pytest.mark.parametrize("ids", [[0, 1, 2**40], ["0", "x" * 200, "ünï"]], ids=["numbers", "texts"])
def test_ids_stay_what_they_are(store: Store, ids: list[Any]) -> None:
    table = opened(store, f"ids{len(str(ids[0]))}{type(ids[0]).__name__}")
    table.put([row(one) for one in ids])
    table.close()
    assert set(by_id(store, f"ids{len(str(ids[0]))}{type(ids[0]).__name__}")) == set(ids)


@pytest.mark.parametrize("table", HOSTILE)
def test_any_name_is_a_name_or_refused(store: Store, table: str) -> None:
    found = opened(store, table)
    if store.name == "lancedb" or (store.name == "qdrant" and set(table) & set('":')):  # names are those of files
        with contextlib.suppress(ConfigError):
            found.put([row("r1")])
            assert by_id(store, table) == {"r1": "a"}
    else:
        found.put([row("r1")])
        found.close()
        assert by_id(store, table) == {"r1": "a"}
    found.close()


def test_any_column_name_is_kept(store: Store) -> None:
    names = [name for name in HOSTILE if store.name != "lancedb" or "." not in name]
    table = opened(store, "columns")
    table.put([{"id": 1, **dict.fromkeys(names, "v"), "embedding": [1.0, 0.0]}])
    table.put([{"id": 1, **dict.fromkeys(names, "w"), "embedding": [1.0, 0.0]}])
    table.close()
    [found] = store.read("columns")
    assert {found[name] for name in names} == {"w"}


def test_a_value_that_does_not_fit_is_an_error_of_its_row(store: Store) -> None:
    table = opened(store, "fits")
    table.put([row(1, kept=5)])
    bad = [row(3, kept="text"), row(3, kept=1.5), row(3, kept=2**70)]
    if store.name == "qdrant":  # which takes any payload
        bad = [row(3, vector="text"), row(3, vector=(1.0, float("nan"), 0.0))]
    for one in bad:
        with pytest.raises(Exception) as raised:
            table.put([row(2, kept=6), one])
        assert not isinstance(raised.value, (OSError, ConfigError, BrokenOffError)), raised.value
    table.put([row(2, kept=6)])
    table.close()
    assert by_id(store, "fits") == {1: 5, 2: 6}


def test_a_vector_of_another_length_is_an_error_of_its_row(store: Store) -> None:
    if store.name in ("sqlite", "postgresql"):
        pytest.skip("JSON and real[] take any length")
    table = opened(store)
    table.put([row(1)])
    table.close()
    again = opened(store)
    with pytest.raises(HeadraceError, match="embedding"):
        again.put([row(2), row(3, vector=(1.0, 2.0))])
    again.close()


def test_values_come_back(store: Store) -> None:
    table = opened(store, "values")
    table.put([row(1, vector=(0.0, 1.0), kept={"a": [1, None, 3], "b": True}), row(2, vector=(0.0, 1.0), kept=None)])
    table.close()
    rows = sorted(store.read("values"), key=lambda one: one["id"])
    kept = [json.loads(one["kept"]) if isinstance(one["kept"], str) else one["kept"] for one in rows]
    assert kept == [{"a": [1, None, 3], "b": True}, None]
    assert rows[0]["embedding"] == [0.0, 1.0]


def test_an_existing_table_without_a_column_is_refused(store: Store) -> None:
    if store.name == "qdrant":
        pytest.skip("a payload has any key")
    table = opened(store, "narrow")
    table.put([{"id": 1, "embedding": [1.0]}])
    table.close()
    with pytest.raises(ConfigError, match="has no column 'kept'"):
        opened(store, "narrow").count(COLUMNS)


def test_a_bad_record_alone_is_refused_by_the_writer(store: Store) -> None:
    writer = find_target(store.address("writer")).writer(Layout("embedding", ("kept",)))
    good = Ok(Record(0, 0, {"kept": "a"}), [1.0, 2.0])
    assert writer.encode([good]) == b""
    bad = {"kept": 5} if store.name != "qdrant" else {"kept": "a"}
    with pytest.raises(HeadraceError, match="'kept'" if store.name != "qdrant" else "embedding"):
        writer.encode([good, Ok(Record(1, 1, bad), [1.0, 2.0, 3.0])])
    writer.close()
    assert by_id(store, "writer") == {0: "a"}
