"""Peak memory of a job with long rows: `python -m benchmarks.memory [--quick]`.

180 rows of 200,000 integers, kept in the output, through a no-op engine; then short rows.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import quick, report
from benchmarks.jobs import measured

ROWS, INTEGERS = (40, 50_000) if quick() else (180, 200_000)
SHORT = 20_000 if quick() else 400_000


def write_inputs(folder: Path) -> dict[str, Path]:
    """The same long rows as JSON Lines and Parquet; rows of 110 bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = {name: folder / name for name in ("long.jsonl", "long.parquet", "short.jsonl")}
    chance = random.Random(0)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("v", pa.list_(pa.int64()))])
    with paths["long.jsonl"].open("w") as lines, pq.ParquetWriter(paths["long.parquet"], schema) as table:
        for number in range(ROWS):
            row = {"id": number, "text": "a text", "v": [chance.randrange(10**6) for _ in range(INTEGERS)]}
            lines.write(json.dumps(row) + "\n")
            table.write_table(pa.Table.from_pylist([row], schema))
    with paths["short.jsonl"].open("w") as lines:
        for number in range(SHORT):
            lines.write(
                json.dumps({"id": number, "text": f"a text of usual length, of number {number}", "v": 1}) + "\n"
            )
    return paths


def main() -> None:
    """The table."""
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, path in write_inputs(folder).items():
            for suffix in ("jsonl", "parquet"):
                figures = measured("keep_v", path, folder / f"out-{source}.{suffix}")
                records = SHORT if source.startswith("short") else ROWS
                over = figures["mib"] - figures["bare_mib"]
                rows.append([f"{source} to {suffix}", f"{records:,}", figures["s"], figures["mib"], over])
    report(
        None if "--print" in sys.argv else "memory",
        f"Peak memory; a long row holds {INTEGERS:,} integers, all of which are kept",
        ["job", "records", "s", "peak MiB", "over the interpreter"],
        rows,
        ["Each job in a process of its own, its input longer than what may wait."],
    )


if __name__ == "__main__":
    main()
