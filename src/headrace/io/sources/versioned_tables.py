"""Tables of Delta Lake, Iceberg and Lance: one version of each, as Arrow batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, HeadraceError, line_of
from headrace.extras import require
from headrace.io.base import Source, class_names
from headrace.io.sources.arrow_batches import ArrowBatches

if TYPE_CHECKING:
    import pyarrow as pa

_ICEBERG = re.compile(r"iceberg://([^/]+)/([^/]+)/?")
_BATCH_ROWS = 8192


def versioned_table(source: object) -> Source | None:
    """The source for a table: its folder, an address `iceberg://catalog/namespace.table`, or an object of its library.

    Returns:
        None for anything else.

    Raises:
        ConfigError: it cannot be read.
        MissingExtraError: its library is not installed.
    """
    if not isinstance(source, (str, Path)):
        make = next((_OBJECTS[name] for name in class_names(source) if name in _OBJECTS), None)
        return None if make is None else make(source)
    found = _ICEBERG.fullmatch(str(source))
    try:
        if found is not None:
            library = require("pyiceberg.catalog", "iceberg", "iceberg://")
            return _iceberg(library.load_catalog(found[1]).load_table(found[2]))
        place = Path(source)
        if (place / "_delta_log").is_dir():
            return _delta(require("deltalake", "delta", f"{place}, a Delta table,").DeltaTable(str(place)))
        if place.suffix == ".lance" and (place / "_versions").is_dir():
            library = require("lancedb", "lancedb", f"{place}, a Lance dataset,")
            return _lance(library.connect(str(place.parent)).open_table(place.stem))
    except HeadraceError:
        raise
    except Exception as error:  # each of the libraries has its own errors
        raise ConfigError(f"cannot read {source}: {line_of(error)}") from error
    return None


def _delta(table: Any) -> Source:
    def read() -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = table.to_pyarrow_dataset().to_batches(
            batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        return batches

    return _of("delta", table.table_uri, table.version(), table.count(), read)


def _iceberg(table: Any) -> Source:
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


_OBJECTS: Mapping[str, Callable[[object], Source]] = {
    "deltalake.DeltaTable": _delta,
    "pyiceberg.Table": _iceberg,
    "lancedb.Table": _lance,
}
