"""The memory limit of the process, and a model of the memory that a batch takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TARGET_SHARE = 0.8
"""Share of the limit that the process may use with a full batch: between 75 and 85 %."""

_PEAKS = 4
"""Batches that must have raised the peak before what was held without one counts no longer."""
_NOISE = 1 << 20
"""Bytes: a smaller rise of the peak does not count."""
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
"""The files with the limit in control groups of versions 2 and 1."""
_NONE = 1 << 60
"""A control group without a limit has a number above this one."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The memory that this process may use."""

    bytes: int
    source: str
    """What sets the limit."""


@dataclass(frozen=True, slots=True)
class BatchPeak:
    """The most memory the process held while a batch ran."""

    tokens: float
    """Tokens of the batch, padding included."""
    length: float
    """Tokens of its longest record."""
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
        """The tokens of a batch that fills the limit with records of this length; inf if tokens take no memory."""
        each = self.per_token + self.per_pair * length
        return max(limit - self.fixed, 0.0) / each if each > 0 else float("inf")


def fit(peaks: Sequence[BatchPeak]) -> MemoryModel:
    """Fit the model to the peaks by least squares; no term is negative. Raises ValueError: there is no peak."""
    if not peaks:
        raise ValueError("no peak was measured")
    import numpy as np

    columns = np.array([(1.0, peak.tokens, peak.tokens * peak.length) for peak in peaks])
    scales = np.abs(columns).max(axis=0)
    scales[scales == 0] = 1.0
    used = [0, 1, 2]
    found = np.zeros(3)
    while True:
        values = np.linalg.lstsq(columns[:, used] / scales[used], [peak.bytes for peak in peaks], rcond=None)[0]
        found[:] = 0.0
        found[used] = values / scales[used]
        worst = 1 + int(np.argmin(found[1:]))
        if found[worst] >= 0:
            break
        used.remove(worst)  # more tokens never take less memory: a negative term is noise
    fixed, per_token, per_pair = found.tolist()
    return MemoryModel(max(fixed, 0.0), per_token, per_pair)


class PeakMeter:
    """The most memory that the process held since `restart`; Linux counts it."""

    def __init__(self, folder: Path = Path("/proc/self")) -> None:
        self._status = folder / "status"
        self._reset = folder / "clear_refs"

    def restart(self) -> bool:
        """Start again; returns whether peaks can be measured here."""
        try:
            self._reset.write_text("5")
        except OSError:
            return False
        return True

    def peak(self) -> int | None:
        """In bytes; None if the system does not say."""
        lines = read_text(self._status).splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

    def peaks(self) -> tuple[int, ...]:
        """The same, counted in each way that the device knows; empty if it cannot be measured."""
        peak = self.peak()
        return () if peak is None else (peak,)


class _PeakHistory:
    """The batches that raised the peak, as counted in one way."""

    def __init__(self, held: int) -> None:
        self.highest = held
        self._peaks = [BatchPeak(0, 0, held)]
        """What was held before the first batch, and each batch that raised the peak."""

    @property
    def has_risen(self) -> bool:
        return len(self._peaks) > 1

    def ran(self, computed: float, length: float, peak: int) -> bool:
        """Count a batch; returns whether it raised the peak. Otherwise it used memory that an earlier one had left."""
        rises = peak > self.highest + _NOISE
        if rises:
            self._peaks.append(BatchPeak(computed, length, peak))
        self.highest = max(self.highest, peak)
        return rises

    def largest_budget(self, limit: float, length: float) -> float:
        # The first batch also brings what all batches share, such as workspaces of libraries: tokens are not its cause.
        peaks = self._peaks if len(self._peaks) <= _PEAKS else self._peaks[1:]
        model = fit(peaks)
        ran = self._peaks[1:]
        short = max(1.0, *(peak.bytes / max(model.peak(peak.tokens, peak.length), 1.0) for peak in ran))
        return model.largest_budget(limit / short, length)


class MemoryWatch:
    """Estimates from measured batches how much memory a larger one would take.

    Args:
        meter: measures the peak; None if it cannot be measured.
    """

    def __init__(self, limit: AvailableMemory, meter: PeakMeter | None) -> None:
        self.limit = limit
        self._meter = meter if meter is not None and meter.restart() else None
        self._histories = [_PeakHistory(held) for held in (self._meter.peaks() if self._meter is not None else ())]
        self._longest = 0.0
        self.bound: float | None = None
        """The budget that would fill the memory; None if unknown."""

    @property
    def highest(self) -> int:
        """The highest peak in bytes; 0 if it is unknown or no batch was counted."""
        return max((history.highest for history in self._histories), default=0) if self._longest else 0

    def ran(self, size: int, computed: float) -> float | None:
        """Count a batch; returns the budget that would fill the memory, once known."""
        peaks = self._meter.peaks() if self._meter is not None and size else ()
        if not peaks:
            return None
        length = computed / size
        is_new = length > self._longest
        self._longest = max(self._longest, length)
        for history, peak in zip(self._histories, peaks, strict=True):
            is_new = history.ran(computed, length, peak) or is_new
        risen = [history for history in self._histories if history.has_risen]
        if is_new and risen:
            target = TARGET_SHARE * self.limit.bytes
            self.bound = min(history.largest_budget(target, self._longest) for history in risen)
        return self.bound


def memory_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> AvailableMemory:
    """The smallest of the machine's memory and the limits of the process's control groups."""
    limits = [AvailableMemory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine")]
    for path in _limit_files(groups, own):
        text = read_text(path)
        if text.isdecimal() and int(text) < _NONE:
            limits.append(AvailableMemory(int(text), f"the control group ({path})"))
    return min(limits, key=lambda limit: limit.bytes)


def _limit_files(groups: Path, own: Path) -> list[Path]:
    """The limit files of the process's own group and of every group above it."""
    files = [groups / name for name in _LIMIT_FILES]
    for line in read_text(own).splitlines():
        _, controllers, place = line.split(":", 2)
        root = groups / "memory" if controllers else groups
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / place.lstrip("/")
        files += [above / name for above in (folder, *folder.parents) if above.is_relative_to(root)]
    return files


def read_text(path: Path) -> str:
    """What a file of the system says; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
