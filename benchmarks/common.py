"""What all benchmarks share: they compare side by side in one run, print one table, and write the figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_MATRIX_INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
"""Flags of /proc/cpuinfo that decide how fast matrix products are, and in which dtypes."""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        model = next((value.strip() for name, _, value in lines if name.strip() == "model name"), model)
        flags = next((set(value.split()) for name, _, value in lines if name.strip() == "flags"), flags)
    return {
        "cpu": model,
        "instructions": [name for flag, name in _MATRIX_INSTRUCTIONS.items() if flag in flags],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def version(package: str) -> str:
    """Name and version of an installed peer."""
    return f"{package} {metadata.version(package)}"


def rounds(count: int, variants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each variant's figure, `count` times, there and back in turn: what disturbs the machine disturbs them all."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    turn = list(variants.items())
    for number in range(count):
        for name, measure in turn[:: -1 if number % 2 else 1]:
            figures[name].append(measure())
    return figures


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the pairwise ratios."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def report(
    name: str | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """Print a Markdown table and write `results/NAME.json`; only print where there is no name, and for a quick run."""
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
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _text(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def quick() -> bool:
    """Whether `--quick` was asked for: a short run that shows the benchmark works, not figures to quote."""
    return "--quick" in sys.argv
