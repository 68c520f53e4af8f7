"""`headrace bench`: Headrace beside other libraries on the user's own machine, model and texts."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path

from headrace.app.bench_contender import CONTENDERS, BenchRequest, Measurement
from headrace.device.cache import cpu_facts
from headrace.device.memory import memory_limit
from headrace.errors import ConfigError
from headrace.io.sources.opening import open_source
from headrace.records import Json
from headrace.wording import spelled

_AGREES = {"embed": 0.99, "classify": 0.99, "generate": 0.9}
_LIBRARIES = ("headrace", "torch", "transformers", "sentence-transformers", "vllm", "ray", "flyte")
_LONGEST = 200
CONTENDER_COMMAND = (sys.executable, "-m", "headrace.app.bench_contender")
"""Starts the process of a contender; the file of its request follows."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is compared."""

    task: str
    model: str
    """A folder."""
    model_name: str
    """What the user calls it."""
    texts: Sequence[str]
    contenders: Sequence[str]
    sizes: Sequence[int]
    """Batch sizes to try beside each contender's default."""
    rounds: int
    timeout_s: float
    """The time limit of a contender in a round, its loading included."""
    dtype: str = "float32"
    device: str = "auto"
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One contender in one setting."""

    contender: str
    setting: str
    records_per_s: float | None
    """The median; None if it failed."""
    rounds: tuple[float, ...] = ()
    headrace_is: float | None = None
    """How many times as fast Headrace's best row is: the median of the rounds' ratios."""
    agreement: float | None = None
    """With the reference: the least cosine of two vectors, or the share of equal labels or texts."""
    differs: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class BenchResult:
    task: str
    rows: tuple[BenchRow, ...]
    reference: str
    """The contender with whose outputs all others were compared."""
    settings: Mapping[str, str]
    machine: Mapping[str, str]
    versions: Mapping[str, str]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


@dataclass(slots=True)
class _ContenderFigures:
    name: str
    seconds: dict[int | None, list[float]] = field(default_factory=dict)
    outputs: dict[int | None, list[object]] = field(default_factory=dict)
    errors: dict[int | None, str] = field(default_factory=dict)
    error: str = ""
    """Why the contender could not be measured at all."""

    @property
    def best(self) -> int | None:
        """The fastest batch size of the first round; None for the default."""
        return min(self.seconds, key=lambda size: self.seconds[size][0])


def contenders_for(task: str) -> list[str]:
    """The contenders for a task that are installed."""
    return [name for name, one in CONTENDERS.items() if task in one.tasks and util.find_spec(one.module) is not None]


def read_texts(source: str, column: str, most: int) -> list[str]:
    """The first texts of an input; rows without one are left out.

    Raises:
        ConfigError: the input cannot be read, or no row has the column.
        JobError: it cannot be read to the end.
    """
    texts: list[str] = []
    columns: Sequence[str] = ()
    for chunk in open_source(source).chunks(lambda position: position):
        for record in chunk.records:
            columns = list(record.data) if isinstance(record.data, Mapping) else ()
            text = record.data.get(column) if isinstance(record.data, Mapping) else record.data
            if isinstance(text, str) and text.strip():
                texts.append(text)
            if len(texts) == most:
                return texts
    if not texts:
        there = f"; its columns are {', '.join(map(str, columns))}" if columns else ""
        raise ConfigError(f"{source} has no text in the column {column!r}{there}: name another with ``text_column``")
    return texts


def compare(settings: BenchSettings, say: Callable[[str], None]) -> BenchResult:
    """Measure all contenders in turn, each in its own process. Blocks.

    The first round tries all batch sizes; the others repeat the default and the best. The turns go there and back.
    """
    entries = {name: _ContenderFigures(name) for name in settings.contenders}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for number in range(settings.rounds):
            for entry in list(entries.values())[:: -1 if number % 2 else 1]:
                if entry.error:
                    continue
                sizes: tuple[int | None, ...] = (None, *settings.sizes)
                if number:
                    sizes = tuple(dict.fromkeys((None, entry.best)))
                elif not CONTENDERS[entry.name].takes_size:
                    sizes = (None,)
                say(f"round {number + 1} of {settings.rounds}: {entry.name} ...")
                _measure(entry, settings, sizes, Path(folder))
                if entry.error:
                    say(f"{entry.name}: {entry.error}")
    return _compared(settings, entries)


def _measure(entry: _ContenderFigures, settings: BenchSettings, sizes: Sequence[int | None], folder: Path) -> None:
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    request: BenchRequest = {
        "task": settings.task, "model": settings.model, "dtype": settings.dtype, "device": settings.device,
        "max_tokens": settings.max_tokens, "texts": list(settings.texts), "contender": entry.name, "sizes": list(sizes),
        "results": str(results), "ready": str(folder / "ready"),
    }  # fmt: skip
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    entry.error = _run(folder, settings.timeout_s)
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last one, of a process that died
            _add(entry, json.loads(line))
    if not entry.seconds:
        entry.error = entry.error or next(iter(entry.errors.values()), "it measured nothing")


def _add(entry: _ContenderFigures, found: Measurement) -> None:
    size = found["size"]
    if "error" in found:
        entry.errors[size] = _line(found["error"])
        return
    entry.seconds.setdefault(size, []).append(found["seconds"])
    entry.outputs[size] = found["outputs"]


def _run(folder: Path, timeout_s: float) -> str:
    """Run the process of a contender; returns why it failed, or nothing."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*CONTENDER_COMMAND, str(folder / "request.json")],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # closed when this process ends, however it does: the contender ends too
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return spelled(f"it took longer than {timeout_s:g} s and was stopped (``timeout``)", "flags")
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own children too, in any case
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if status < 0:
        return f"its process died of {signal.Signals(-status).name}"
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return _line(said[-1] if said else f"it ended with status {status}") if status else ""


def _line(text: str) -> str:
    words = " ".join(text.split())
    return "".join(letter for letter in words if letter.isprintable())[:_LONGEST]


def _compared(settings: BenchSettings, entries: Mapping[str, _ContenderFigures]) -> BenchResult:
    order = ("sentence-transformers", "transformers pipeline", "headrace", *entries)
    reference = next((name for name in order if name in entries and entries[name].seconds), "")
    expected: list[object] = next(iter(entries[reference].outputs.values())) if reference else []
    ours = entries.get("headrace")
    best = ours.seconds[ours.best] if ours is not None and ours.seconds else []
    rows = [
        _row(settings, entry, size, best, [] if entry.name == reference else expected)
        for entry in entries.values()
        for size in (dict.fromkeys((None, entry.best)) if entry.seconds else (None,))
    ]
    return BenchResult(settings.task, tuple(rows), reference, _described(settings), machine(), _versions())


def _row(
    settings: BenchSettings,
    entry: _ContenderFigures,
    size: int | None,
    best: Sequence[float],
    expected: Sequence[object],
) -> BenchRow:
    setting = "default" if size is None else f"batch size {size}"
    times = entry.seconds.get(size, [])
    if not times:
        return BenchRow(entry.name, setting, None, error=entry.error or entry.errors.get(size, "it measured nothing"))
    rates = tuple(len(settings.texts) / seconds for seconds in times)
    ratios = [theirs / mine for mine, theirs in itertools.zip_longest(best, times) if mine and theirs]
    agreement = _agreement(settings.task, entry.outputs[size], expected) if expected else None
    return BenchRow(
        entry.name,
        setting,
        statistics.median(rates),
        rates,
        statistics.median(ratios) if ratios else None,
        agreement,
        agreement is not None and not agreement >= _AGREES[settings.task],
        entry.error or "; ".join(f"batch size {one or 'default'}: {why}" for one, why in entry.errors.items()),
    )


def _agreement(task: str, outputs: Sequence[Json], expected: Sequence[Json]) -> float:
    if task == "embed":
        return min(_cosine(one, other) for one, other in zip(outputs, expected, strict=True))
    equal: int = sum(one == other for one, other in zip(outputs, expected, strict=True))
    return equal / len(expected)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return 0.0
    product = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = math.hypot(*one) * math.hypot(*other)
    return product / lengths if lengths else 0.0


def _described(settings: BenchSettings) -> dict[str, str]:
    characters = statistics.median(map(len, settings.texts))
    return {
        "task": settings.task,
        "model": settings.model_name,
        "texts": f"{len(settings.texts):,}, of {characters:,.0f} characters (median)",
        "dtype": settings.dtype,
        "device": settings.device,
        "rounds": str(settings.rounds),
        **({"new tokens of each text": f"at most {settings.max_tokens}"} if settings.task == "generate" else {}),
    }


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    facts = cpu_facts()
    return {
        "CPU": str(facts["cpu"]),
        "instruction sets": ", ".join(facts["instructions"]) or "-",
        "cores": str(os.cpu_count()),
        "memory": f"{memory_limit().bytes / 1e9:,.1f} GB",
        "GPU": ", ".join(_gpus()) or "none",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
    }


def _gpus() -> list[str]:
    """The GPUs, as the driver's own tool names them."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
