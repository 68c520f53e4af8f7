"""A job that kills its process at a moment of its commits.

`python -m tests.integration.io.killed SOURCE SINK MOMENT PART`. A moment is between the table and the ledger, before
the rows of a part are put into the table, or after both.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import headrace
from headrace.io.sinks.tables import TableWriter
from headrace.io.storage.parts import PartFolder
from headrace.jobs.settings import Limits

MOMENTS = ("between", "before", "after")
PART_ROWS = 50


def arm(moment: str, part: int) -> None:
    """Kill this process at that moment of its n-th part."""
    commit = PartFolder.commit
    seen = [0]

    def die(now: str) -> None:
        if now == moment and seen[0] == part:
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(encode: Callable[[TableWriter, Any], bytes]) -> Callable[[TableWriter, Any], bytes]:
        def encoded(self: TableWriter, rows: Any) -> bytes:
            seen[0] += 1
            die("before")
            found = encode(self, rows)
            die("between")
            return found

        return encoded

    def committed(self: PartFolder, *arguments: Any) -> None:
        commit(self, *arguments)
        die("after")

    for name in ("encode", "encode_columns"):  # of rows one by one, and of blocks
        setattr(TableWriter, name, deadly(getattr(TableWriter, name)))
    PartFolder.commit = committed  # type: ignore[assignment,method-assign]


def main() -> None:
    """Run the job."""
    source, sink, moment, part = sys.argv[1:]
    arm(moment, int(part))
    sql = "SELECT id, text FROM docs ORDER BY id" if "://" in source else None
    limits = Limits(part_records=PART_ROWS)
    headrace.run(
        source, sink=sink, sql=sql, task="embed", engine="headrace.testing:FakeEngine", limits=limits, progress=False
    )


if __name__ == "__main__":
    main()
