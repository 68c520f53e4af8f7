"""What all benchmarks share: they compare side by side in one run, print one table, and write the figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.device.cache import cpu_facts
from headrace.device.native import speeds
from headrace.observe.reporting.report import Report

RESULTS = Path(__file__).parent / "results"

_main = sys.modules["__main__"]
if not {"-h", "--help"}.isdisjoint(sys.argv[1:]) and not hasattr(_main, "argparse"):
    print(_main.__doc__)  # most take a word or two, and all would measure for minutes instead
    sys.exit()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    system = f"{platform.system()} {platform.machine()}"
    return {**cpu_facts(), "cores": os.cpu_count(), "python": platform.python_version(), "system": system}


def version(package: str) -> str:
    """Name and version of an installed peer."""
    return f"{package} {metadata.version(package)}"


@contextmanager
def new_cache() -> Iterator[None]:
    """As on a machine where nothing was found out before."""
    before = os.environ.get("XDG_CACHE_HOME")
    speeds.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


def job_time(done: Report) -> float:
    """Seconds of a job, with tuning and without loading its model."""
    return done.wall_s + (done.precision.duration_s if done.precision is not None else 0.0)


def rounds(count: int, variants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each variant's figure, `count` times, there and back in turn: what disturbs the machine disturbs them all."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    turn = list(variants.items())
    for number in range(count):
        for name, measure in turn[:: -1 if number % 2 else 1]:
            figures[name].append(measure())
    return figures


class Parts:
    """Figures of a long benchmark, kept in a file. With `--minutes 5` it stops after that time; run again, it goes on.

    Args:
        name: of the benchmark.
    """

    def __init__(self, name: str) -> None:
        self._file = RESULTS / f".{name}.part.json"
        self._kept: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        given = sys.argv[sys.argv.index("--minutes") + 1] if "--minutes" in sys.argv else "inf"
        self._seen: dict[str, int] = {}
        self._ends = time.monotonic() + 60 * float(given)

    def rounds(self, count: int, variants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """As `rounds`, without what was measured before. Exits when the time is up."""
        return rounds(count, {name: partial(self.once, name, measure) for name, measure in variants.items()})

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returns, as JSON. The n-th call with a name has the n-th figure, of whichever run."""
        figures = self._kept.setdefault(name, [])
        seen = self._seen[name] = self._seen.get(name, 0) + 1
        if len(figures) < seen:
            if time.monotonic() > self._ends:
                sys.exit("the time is up: run it again to go on")
            figures.append(measure())
            self._file.write_text(json.dumps(self._kept))
        return figures[seen - 1]

    def note(self, name: str, *values: Any) -> list[Any]:
        """Add values under a name; returns all that are kept under it."""
        kept: list[Any] = self._kept.setdefault(name, [])
        kept += values
        return kept

    def done(self) -> None:
        """Forget the figures: the benchmark has printed them."""
        self._file.unlink(missing_ok=True)


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the pairwise ratios."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def report(
    name: str | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """Print a Markdown table and write `results/NAME.json`; only print where there is no name, and for a quick run.

    Where NAME.json is of another CPU, it stays, and the file is NAME-INSTRUCTIONS.json.
    """
    here = machine()
    cells = [[_text(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    print(f"\n### {title}\n")
    for index, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if not index:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for note in notes:
        print(f"\n{note}")
    cpu = ", ".join([here["cpu"], *here["instructions"]])
    print(f"\n{cpu}, {here['cores']} cores, Python {here['python']}, {here['system']}", flush=True)
    if name is None or quick():
        return
    RESULTS.mkdir(exist_ok=True)
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    content = {"benchmark": title, "machine": here, "rows": table, "notes": list(notes)}
    _file(name, here).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _file(name: str, here: Mapping[str, Any]) -> Path:
    """Where the figures of this machine go."""
    own = RESULTS / f"{name}.json"
    if not own.exists() or all(json.loads(own.read_text())["machine"].get(fact) == here[fact] for fact in cpu_facts()):
        return own
    limit = here.get("ATEN_CPU_CAPABILITY")  # of a CPU that is kept from some of its instructions
    floats = [flag for flag in here["instructions"] if "int8" not in flag]
    return RESULTS / f"{name}-{limit or (floats or ['cpu'])[-1]}.json"


def _text(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def quick() -> bool:
    """Whether `--quick` was asked for: a short run that shows the benchmark works, not figures to quote."""
    return "--quick" in sys.argv
