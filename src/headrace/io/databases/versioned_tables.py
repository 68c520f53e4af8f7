"""Tables of Delta Lake, Iceberg and Lance: one version of each, as Arrow batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, raised_as
from headrace.extras import require
from headrace.io.base import Source, SourcePlugin
from headrace.io.sources.arrow_batches import ArrowBatches

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    import pyiceberg.table

_ICEBERG = re.compile(r"iceberg://([^/]+)/([^/]+)/?")
_BATCH_ROWS = 8192


def _iceberg_address(name: str, _query: str | None) -> Source | None:
    found = _ICEBERG.fullmatch(name)
    if found is None:
        return None
    with raised_as(ConfigError, f"cannot read {name}"):
        library = require("pyiceberg.catalog", "iceberg", "iceberg://")
        return _iceberg(library.load_catalog(found[1]).load_table(found[2]))


def _delta_folder(folder: str, _query: str | None) -> Source:
    with raised_as(ConfigError, f"cannot read {folder}"):
        return _delta(require("deltalake", "delta", f"{folder}, a Delta table,").DeltaTable(folder))


def _lance_folder(folder: str, _query: str | None) -> Source | None:
    place = Path(folder)
    if place.suffix != ".lance":
        return None
    with raised_as(ConfigError, f"cannot read {folder}"):
        library = require("lancedb", "lancedb", f"{folder}, a Lance dataset,")
        return _lance(library.connect(str(place.parent)).open_table(place.stem))


def _delta(table: deltalake.DeltaTable) -> Source:
    def read() -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = table.to_pyarrow_dataset().to_batches(
            batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        return batches

    return _of("delta", table.table_uri, table.version(), table.count(), read)


def _iceberg(table: pyiceberg.table.Table) -> Source:
    scan = table.scan()
    snapshot = table.current_snapshot()

    def read() -> Iterator[pa.RecordBatch]:
        return iter(scan.to_arrow_batch_reader())

    return _of("iceberg", table.location(), snapshot and snapshot.snapshot_id, scan.count(), read)


def _lance(table: Any) -> Source:
    def read() -> Iterator[pa.RecordBatch]:
        return iter(table.search().to_batches(batch_size=_BATCH_ROWS))

    return _of("lance", table.name, table.version, table.count_rows(), read)


def _of(
    kind: str, place: str, version: int | None, total: int, read: Callable[[], Iterator[pa.RecordBatch]]
) -> ArrowBatches:
    facts = {"format": kind, "version": version, "records": total}
    return ArrowBatches(f"the {kind} table {place}", facts, total, read)


DELTA = SourcePlugin(open=_delta_folder, extra="delta")
DELTA_TABLE = SourcePlugin(open=lambda table, _: _delta(table), extra="delta")
ICEBERG = SourcePlugin(open=_iceberg_address, extra="iceberg")
ICEBERG_TABLE = SourcePlugin(open=lambda table, _: _iceberg(table), extra="iceberg")
LANCE = SourcePlugin(open=_lance_folder, extra="lancedb")
LANCE_TABLE = SourcePlugin(open=lambda table, _: _lance(table), extra="lancedb")
