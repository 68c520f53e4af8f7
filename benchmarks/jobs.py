"""Bulk jobs with a no-op engine: speed, memory, resume, the cost of durability."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.jobs_runs import BATCH, VECTORS_A_SECOND

SMALL, LARGE = (20_000, 100_000) if quick() else (1_000_000, 10_000_000)
PACED = 20_000 if quick() else 300_000
VECTORS = 20_000 if quick() else 400_000
ROUNDS = 1 if quick() else 3


def write_input(path: Path, records: int) -> None:
    """Records of about 110 bytes."""
    with path.open("w") as file:
        for number in range(records):
            text = f"record {number}: a line of text of the usual length, as a review or a question may have"
            file.write(f'{{"id":{number},"text":"{text}"}}\n')


def measured(name: str, source: Path, sink: Path, *, dies_at: int | None = None) -> dict[str, Any]:
    """The figures of one variant, run in a process of its own; {} if it was to be killed."""
    command = [sys.executable, "-m", "benchmarks.jobs_runs", name, str(source), str(sink)]
    environment = dict(os.environ)
    if dies_at is not None:
        environment["HEADRACE_BENCH_DIES_AT"] = str(dies_at)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if dies_at is not None and done.returncode == -signal.SIGKILL:
        return {}
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def size(folder: Path) -> None:
    """Records a second and memory, at two sizes."""
    rows: list[list[Any]] = []
    for kind in ("jsonl", "parquet"):
        peaks: list[float] = []
        for records in (SMALL, LARGE):
            sink = folder / f"out-{records}.{kind}"
            figures = measured("headrace", folder / f"in-{records}.jsonl", sink)
            sink.unlink()
            peaks.append(figures["mib"] - figures["bare_mib"])
            rows.append([f"JSONL to {kind}", f"{records:,}", round(records / figures["s"]), figures["mib"], peaks[-1]])
        rows[-1].append(peaks[1] / peaks[0])
        rows[-2].append("")
    report(
        "jobs-size",
        "Bulk jobs with a no-op engine",
        ["job", "records", "records/s", "peak MiB", "over the interpreter", "x the smaller job"],
        rows,
        [f"Batches of {BATCH:,}; ids are looked at for doubles; each job in a process of its own."],
    )


def tables(folder: Path) -> None:
    """From a table in memory to another, beside the same rows from a file to Parquet."""
    lines, columns = folder / f"in-{SMALL}.jsonl", folder / f"in-{SMALL}.parquet"
    pyarrow.parquet.write_table(pyarrow.json.read_json(lines), columns)
    runs = {"Parquet to Parquet": ("headrace", columns), "JSONL to Parquet": ("headrace", lines)} | {
        f"{kind} to {kind}": (f"to_{kind}", lines) for kind in ("pandas", "polars", "arrow")
    }
    outputs = itertools.count()
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in runs}
    for _ in range(ROUNDS):
        for job, (name, source) in runs.items():
            found[job].append(measured(name, source, folder / f"table-{next(outputs)}.parquet"))
    times = {job: [one["s"] for one in figures] for job, figures in found.items()}
    rows = [
        [
            job,
            statistics.median(times[job]),
            ratio(times[job], times["Parquet to Parquet"]),
            statistics.median(one["mib"] - one["bare_mib"] for one in figures),
        ]
        for job, figures in found.items()
    ]
    report(
        "jobs-tables",
        "A table to a table, with a no-op engine",
        ["job", "s", "x Parquet to Parquet", "peak MiB over what was there"],
        rows,
        [f"{SMALL:,} records; medians of {ROUNDS} rounds, the variants in turn. The table itself is there before."],
    )


def resume(folder: Path) -> None:
    """Kill a job after nine tenths and go on."""
    source, sink = folder / f"in-{LARGE}.jsonl", folder / "resumed.jsonl"
    measured("headrace", source, sink, dies_at=LARGE * 9 // 10)
    done = sum(
        int(end) - int(start)
        for _, start, end in (part.stem.split("-") for part in folder.glob("resumed.jsonl.parts/part-*.jsonl"))
    )
    figures = measured("headrace", source, sink)
    with sink.open() as file:
        ids = sum(1 for _ in file)
    if ids != LARGE:
        sys.exit(f"{ids} records in the output of {LARGE}")
    rows = [[f"{LARGE:,}", f"{done:,}", figures["first_s"], figures["s"], f"{ids:,}"]]
    report(
        "jobs-resume",
        "A job killed with nine tenths done, and continued",
        ["records", "committed before", "s until the engine works again", "s until the end", "records in the output"],
        rows,
    )


def rates(
    figures: Mapping[str, list[float]], records: int, last: Callable[[list[float]], float]
) -> list[list[str | float]]:
    """Each variant's seconds, records a second, and a figure of its own from its times."""
    return [
        [name, statistics.median(times), records / statistics.median(times), last(times)]
        for name, times in figures.items()
    ]


def durability(folder: Path) -> None:
    """Against writing a plain file, at the pace of an engine of 10,000 records/s."""
    source = folder / "paced.jsonl"
    write_input(source, PACED)

    outputs = itertools.count()

    def seconds(name: str) -> float:
        return float(measured(name, source, folder / f"paced-{next(outputs)}.jsonl")["s"])

    names = {"plain_file": "batcher into a plain file", "paced": "headrace.run, parts made durable"}
    figures = rounds(ROUNDS, {title: functools.partial(seconds, name) for name, title in names.items()})
    plain = figures[names["plain_file"]]
    report(
        "jobs-durability",
        "What durability costs, with an engine of 10,000 records/s",
        ["variant", "s", "records/s", "x the plain file's time"],
        rates(figures, PACED, lambda times: ratio(times, plain)),
        [f"{PACED:,} records; medians of {ROUNDS} rounds, the variants in turn."],
    )


def vectors(folder: Path) -> None:
    """Vectors from a device that makes 50,000 a second, into one file and into a folder."""
    source = folder / "texts.jsonl"
    write_input(source, VECTORS)
    outputs = itertools.count()

    def seconds(suffix: str) -> float:
        sink = folder / f"vectors-{next(outputs)}{suffix}"
        found = float(measured("vectors", source, sink)["s"])
        shutil.rmtree(sink) if sink.is_dir() else sink.unlink()
        return found

    names = {".parquet": "one Parquet file", "": "a folder of Parquet parts"}
    figures = rounds(ROUNDS, {name: functools.partial(seconds, suffix) for suffix, name in names.items()})
    device_s = VECTORS / VECTORS_A_SECOND
    report(
        "jobs-vectors",
        "Vectors of 384 numbers from a device that makes 50,000 a second",
        ["output", "s", "records/s", "device busy"],
        rates(figures, VECTORS, lambda times: device_s / statistics.median(times)),
        [f"{VECTORS:,} records, 1,536 bytes of numbers each; medians of {ROUNDS} rounds, the variants in turn."],
    )


def main() -> None:
    """The tables that are named, or all."""
    known = {table.__name__: table for table in (size, tables, resume, durability, vectors)}
    wanted = [word for word in sys.argv[1:] if word != "--quick"]
    if not known.keys() >= set(wanted):
        sys.exit(f"usage: python -m benchmarks.jobs [--quick] [{' | '.join(known)} ...]")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for records in (SMALL, LARGE) if set(wanted or known) - {"durability", "vectors"} else ():
            write_input(folder / f"in-{records}.jsonl", records)
        for table in wanted or known:
            known[table](folder)


if __name__ == "__main__":
    main()
