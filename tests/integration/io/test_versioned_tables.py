"""Tables of Delta Lake, Iceberg and Lance as inputs: a folder, an address, or an object of the library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError, ResumeMismatchError
from headrace.io.sources.opening import open_source

pa: Any = pytest.importorskip("pyarrow")

ROWS = 9000
TABLE = pa.table({"id": range(ROWS), "text": [f"text {n}" for n in range(ROWS)]})


def delta(folder: Path) -> tuple[str, Any, Callable[[], object]]:
    library = pytest.importorskip("deltalake")
    path = str(folder / "delta")
    library.write_deltalake(path, TABLE)
    return path, library.DeltaTable(path), lambda: library.write_deltalake(path, TABLE.slice(0, 1), mode="append")


def iceberg(folder: Path) -> tuple[str, Any, Callable[[], object]]:
    library = pytest.importorskip("pyiceberg.catalog")
    pytest.importorskip("sqlalchemy")
    settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/house"}
    (folder / ".pyiceberg.yaml").write_text(
        "catalog:\n  mine:\n" + "".join(f"    {name}: {value}\n" for name, value in settings.items())
    )
    catalog = library.load_catalog("mine", **settings)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.docs", schema=TABLE.schema)
    table.append(TABLE)
    return "iceberg://mine/ns.docs", catalog.load_table("ns.docs"), lambda: table.append(TABLE.slice(0, 1))


def lance(folder: Path) -> tuple[str, Any, Callable[[], object]]:
    table = pytest.importorskip("lancedb").connect(folder / "db").create_table("docs", TABLE)
    return str(folder / "db" / "docs.lance"), table, lambda: table.add(TABLE.slice(0, 1))


def ids(source: object, done: int = 0) -> list[int]:
    chunks = open_source(source).chunks(lambda position: max(position, done))
    return [record.data["id"] for chunk in chunks for record in chunk.records]


@pytest.mark.parametrize("make", [delta, iceberg, lance])
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_all_rows_of_one_version(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    for variable in ("URI", "WAREHOUSE", "TYPE"):
        monkeypatch.delenv(f"PYICEBERG_CATALOG__MINE__{variable}", raising=False)
    name, table, append = make(tmp_path)
    if make is iceberg:  # its configuration is read once, when it is imported
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", importlib.import_module("pyiceberg.utils.config").Config())
    for source in (name, table):
        opened = open_source(source)
        assert opened.total_records == ROWS
        assert sorted(ids(source)) == list(range(ROWS))
        assert ids(source, done=8000) == ids(source)[8000:]
    run = {"sink": tmp_path / "out.jsonl", "task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False}
    assert headrace.run(name, **run).ok == ROWS
    append()
    with pytest.raises(ResumeMismatchError, match=r"the input's version"):
        headrace.run(name, **run)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    (tmp_path / "broken" / "_delta_log").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot read .*broken"):
        open_source(tmp_path / "broken")
