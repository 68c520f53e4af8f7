"""What becomes of the jobs of the hostile corpus: `python -m tests.hostile.outcomes FILE [PART/OF] [PATTERN]`.

Runs them with whichever Headrace is on the path, and writes a line of JSON for each: its name and its outcome.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from polars.exceptions import PanicException
from tests.hostile.corpus import Case, cases

import headrace
from headrace.errors import HeadraceError
from headrace.jobs.settings import Limits

Outcome: TypeAlias = Mapping[str, Any]
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where syncing a file takes no time."""
FIGURES = ("state", "ok", "failed", "skipped", "failures", "truncated", "empty", "nulled", "duplicates")
"""Those that a revision does not have are left out."""


def outcome(case: Case, folder: Path) -> Outcome:
    """Run a job in an empty folder: how it ended, and the content of all that it wrote.

    A job that raises has no content: what it had committed by then is a matter of time.
    """
    for name, data in case.files().items():
        path = folder / ("" if name.startswith("in.") else "in") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    source = next(map(str, folder.glob("in*"))) if case.table is None else _made(case.table)
    asked = dict(case.settings)
    limits = Limits(max_error_rate=1, commit_interval_s=3600, **asked.pop("limits", {}))  # parts by counts alone
    sink = f"{folder}/{asked.pop('sink')}"
    said: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            report = headrace.run(source, sink=sink, limits=limits, progress=False, **asked)
        except HeadraceError as error:
            return {"end": f"{type(error).__name__}: {error}".replace(str(folder), "DIR")}
        except (Exception, PanicException) as error:  # noqa: BLE001 - none should come; that one does is the outcome
            return {"end": f"a traceback: {type(error).__name__}: {error}".replace(str(folder), "DIR")}
    said += [f"{one.category.__name__}: {one.message}" for one in warned if issubclass(one.category, UserWarning)]
    figures = {f"figure {name}": _shown(getattr(report, name)) for name in FIGURES if hasattr(report, name)}
    left_out = "".join(f", left out {one.reason}" for one in getattr(report, "left_out", ()))
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and _is_output(path.relative_to(folder))]
    written: dict[str, list[Path]] = {}
    for path in paths:  # where a part ends is a matter of time
        name = str(path.relative_to(folder))
        written.setdefault(re.sub(r"part-[\d-]+", "part-*", name), []).append(path)
    contents = {name: content(files).replace(str(folder), "DIR") for name, files in written.items()}
    return {"end": "finished" + left_out, **figures, "said": "\n".join(said).replace(str(folder), "DIR"), **contents}


def _made(table: Callable[[], Any]) -> object:
    """A table; None if the library does not have the type."""
    try:
        return table()
    except Exception:  # noqa: BLE001 - whatever the libraries raise
        return None


def _shown(figure: object) -> str:
    return str(sorted(figure.items()) if isinstance(figure, Mapping) else figure)


def _is_output(path: Path) -> bool:
    if path.parts[0].startswith("in"):
        return False
    return path.name == "errors.jsonl" or not any(
        part.startswith("_") or part.endswith(".parts") for part in path.parts
    )


def content(paths: Sequence[Path]) -> str:
    """Text files as they are, tables as their schema and their columns, all parts of a folder together."""
    if paths[0].suffix != ".parquet":
        data = b"".join(
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in paths
        )
        return data.decode(errors="surrogateescape")
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.ParquetFile(path).read() for path in paths]
    if any(not table.schema.equals(tables[0].schema, check_metadata=True) for table in tables):
        return "\n".join(_table(table) for table in tables)
    return _table(pa.concat_tables(tables))


def _table(table: Any) -> str:
    columns = zip(table.column_names, table.columns, strict=True)
    return f"{table.schema}\n{table.num_rows} rows" + "".join(
        f"\n{name}: {_values(column)}" for name, column in columns
    )


def _values(column: Any) -> str:
    try:
        return repr(column.to_pylist())
    except (ValueError, OverflowError, ArithmeticError):  # Python cannot hold one of them
        return str(column.combine_chunks().to_string(window=10**6, container_window=10**6))


def run(case: Case) -> Outcome:
    """The outcome of a job in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-", dir=IN_MEMORY))
    try:
        return outcome(case, folder)
    finally:
        shutil.rmtree(folder)


def main(target: str, part: str = "0/1", pattern: str = "*") -> None:
    """Write the outcomes of every n-th case."""
    logging.disable(logging.CRITICAL)
    first, step = map(int, part.split("/"))
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, pattern)]
    with Path(target).open("w") as file:
        for case in chosen[first::step]:
            file.write(json.dumps([case.name, run(case)]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
