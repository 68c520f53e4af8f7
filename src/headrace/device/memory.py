"""How much memory there is, and what a batch takes of it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TARGET_SHARE = 0.8
"""Of the memory that a full batch should take, with all else: between 75 and 85 %."""

_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
"""Of control groups, version 2 and 1."""
_NONE = 1 << 60
"""A control group without a limit says so with an absurd number."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What this process may use."""

    bytes: int
    source: str
    """Whose limit it is."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory the process held while a batch ran."""

    tokens: float
    """Of the batch, padding included."""
    length: float
    """Of its longest record."""
    bytes: float


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes = fixed + per_token · tokens + per_pair · tokens · length: a model, its activations, and attention.

    The form is that of a transformer's forward pass (Korthikanti et al., 2022, "Reducing Activation Recomputation in
    Large Transformer Models"): activations grow with the tokens, scores of attention with tokens times length.
    """

    fixed: float
    per_token: float
    per_pair: float

    def peak(self, tokens: float, length: float) -> float:
        """Bytes that a batch takes, the model included."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * length

    def largest_budget(self, limit: float, length: float) -> float:
        """The tokens of a batch with which records of this length fill the limit; inf where tokens take nothing."""
        each = self.per_token + self.per_pair * length
        return max(limit - self.fixed, 0.0) / each if each > 0 else float("inf")


def fit(peaks: Sequence[Peak]) -> MemoryModel:
    """The model that explains the peaks best, by least squares; no term is negative.

    Raises:
        ValueError: there is no peak.
    """
    if not peaks:
        raise ValueError("no peak was measured")
    terms = [True, True, True]
    while True:
        found = _solve(peaks, terms)
        worst = min(range(1, 3), key=lambda place: found[place])
        if found[worst] >= 0 or not terms[worst]:
            break
        terms[worst] = False  # more tokens never take less memory: what says so is noise
    fixed, per_token, per_pair = found
    return MemoryModel(max(fixed, 0.0), max(per_token, 0.0), max(per_pair, 0.0))


def _solve(peaks: Sequence[Peak], terms: Sequence[bool]) -> list[float]:
    """Coefficients of the terms that are on, by the normal equations with scaled columns; 0 for the others."""
    columns = [[1.0, peak.tokens, peak.tokens * peak.length] for peak in peaks]
    scales = [max(abs(row[place]) for row in columns) or 1.0 for place in range(3)]
    on = [place for place in range(3) if terms[place]]
    rows = [[row[place] / scales[place] for place in on] for row in columns]
    matrix = [
        [sum(row[i] * row[j] for row in rows) + (1e-12 if i == j else 0.0) for j in range(len(on))]
        + [sum(row[i] * peak.bytes for row, peak in zip(rows, peaks, strict=True))]
        for i in range(len(on))
    ]
    values = _eliminate(matrix)
    found = [0.0, 0.0, 0.0]
    for place, value in zip(on, values, strict=True):
        found[place] = value / scales[place]
    return found


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """The solution of a small system of linear equations; the last column is the right side."""
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[row][-1] / matrix[row][row] for row in range(size)]


def memory_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> MemoryLimit:
    """The least of the machine's memory and the limits of the control groups that the process is in."""
    limits = [MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine")]
    for path in _limit_files(groups, own):
        text = _read(path)
        if text.isdecimal() and int(text) < _NONE:
            limits.append(MemoryLimit(int(text), f"the control group ({path})"))
    return min(limits, key=lambda limit: limit.bytes)


def _limit_files(groups: Path, own: Path) -> list[Path]:
    """Those of the process's own group and of every group above it."""
    files = [groups / name for name in _LIMIT_FILES]
    for line in _read(own).splitlines():
        _, controllers, place = line.split(":", 2)
        root = groups / "memory" if controllers else groups
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / place.lstrip("/")
        files += [above / name for above in (folder, *folder.parents) if above.is_relative_to(root)]
    return files


def process_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The memory that the process holds now; the most it has held so far where Linux does not tell."""
    fields = _read(statm).split()
    if len(fields) > 1:
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class PeakMeter:
    """The most memory that the process held since `restart`; Linux counts it."""

    def __init__(self, folder: Path = Path("/proc/self")) -> None:
        self._status = folder / "status"
        self._reset = folder / "clear_refs"

    def restart(self) -> bool:
        """Forget what was. Returns whether peaks can be measured here."""
        try:
            self._reset.write_text("5")
        except OSError:
            return False
        return True

    def peak(self) -> int | None:
        """Bytes; None where the system does not say."""
        return _from_status(self._status, "VmHWM:")


def _from_status(status: Path, name: str) -> int | None:
    line = next((line for line in _read(status).splitlines() if line.startswith(name)), None)
    return int(line.split()[1]) * 1024 if line else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
