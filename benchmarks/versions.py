"""This checkout beside an earlier revision of it: the batcher, a job and a server, in turns.

    python -m benchmarks.versions REVISION [--quick] [--minutes N]

Checks the revision out into a temporary folder. Both run in this environment, each measurement in a process of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import Parts, quick, ratio, report

ROOT = Path(__file__).parent.parent
ROUNDS = 1 if quick() else 5
NAMES = {
    "submit": "batcher: submit, a no-op engine",
    "map": "batcher: map, a no-op engine",
    "overlap": "batcher: load 3 : infer 2 : write 1, six producers",
    "jsonl": "job: 200,000 records, JSON Lines to JSON Lines",
    "parquet": "job: 200,000 records, JSON Lines to Parquet",
    "serve": "server: a no-op engine, 16 callers",
}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The revision's `src` folder.

    Raises:
        subprocess.CalledProcessError: there is no such revision.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measured(name: str, source: Path) -> float:
    """Microseconds of processor time per record, with the package in `source`."""
    command = [sys.executable, "-m", "benchmarks.versions_runs", name]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} with {source} ended with status {done.returncode}:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure both in turn and print the table."""
    revision = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if revision is None:
        sys.exit("usage: python -m benchmarks.versions REVISION")
    rows, parts = [], Parts("versions")
    with checked_out(revision) as before:
        for name, title in NAMES.items():
            sources = {f"{name} now": ROOT / "src", f"{name} before": before}
            found = parts.rounds(ROUNDS, {one: partial(measured, name, path) for one, path in sources.items()})
            rows.append([title, *map(statistics.median, found.values()), ratio(*found.values())])
    report(
        "versions",
        f"Processor time beside revision {revision}",
        ["work", "µs per record", "µs before", "x before"],
        rows,
        [
            "Processor time of each further record; of the row with six producers, time on the clock.",
            f"Medians of {ROUNDS} rounds in turns; ratios are medians of pairs.",
        ],
    )
    parts.done()


if __name__ == "__main__":
    main()
