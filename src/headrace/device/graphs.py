"""Which shapes of batches are captured once and replayed, so that the host need not launch each kernel. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

_MOST_TOKENS = 8_192
"""Larger batches keep a GPU busy for longer than the host takes to launch their kernels."""
_MOST_SHAPES = 16
_LEAST_SEEN = 16
"""Batches of a shape before it is captured."""
_LEAST_SHARE = 1 / 50
"""The least share of all batches for a shape that is captured."""
_TRIALS = 5
"""Replays that are compared with earlier batches of the shape."""
_FASTER = 1.05
"""How many times as fast replays must be to go on, by the median."""

ShapeState: TypeAlias = Literal["seen", "wanted", "captured", "refused"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape that batches of nearly this shape are padded to."""

    texts: int
    length: int


@dataclass(slots=True)
class _ShapeRecord:
    state: ShapeState = "seen"
    seen: int = 0
    direct: deque[float] = field(default_factory=lambda: deque(maxlen=_LEAST_SEEN))
    """Seconds of the last batches that were not replayed."""
    replayed: list[float] = field(default_factory=list)
    """Seconds of the first replays."""


class ShapeBook:
    """Counts shapes, and says which one to capture, to replay and to give up.

    Args:
        most_bytes: memory that all captured shapes may take together.
    """

    def __init__(self, most_bytes: float) -> None:
        self._room = most_bytes
        self._batches = 0
        self._records: dict[BatchShape, _ShapeRecord] = {}

    def shape(self, texts: int, length: int) -> BatchShape | None:
        """What a batch would be padded to; None if it is too large to gain anything."""
        step = 16 if length <= 128 else 64
        rounded = BatchShape(1 << (texts - 1).bit_length(), -(-length // step) * step)
        return rounded if rounded.texts * rounded.length <= _MOST_TOKENS else None

    def state(self, shape: BatchShape) -> ShapeState:
        return self._records[shape].state if shape in self._records else "seen"

    def ran(self, shape: BatchShape, seconds: float) -> None:
        """Count a batch that was not replayed."""
        self._batches += 1
        record = self._records.setdefault(shape, _ShapeRecord())
        record.seen += 1
        record.direct.append(seconds)
        taken = sum(one.state in ("wanted", "captured") for one in self._records.values())
        often = record.seen >= max(_LEAST_SEEN, _LEAST_SHARE * self._batches)
        if record.state == "seen" and often and taken < _MOST_SHAPES and self._room > 0:
            record.state = "wanted"

    def captured(self, shape: BatchShape, size: int) -> None:
        """A shape was captured; `size` is the memory that it takes, in bytes."""
        self._records[shape].state = "captured"
        self._room -= size

    def refuse(self, shape: BatchShape) -> None:
        """Do not capture a shape, or not again: it cannot be captured, or it gives other outputs."""
        self._records[shape].state = "refused"

    def replayed(self, shape: BatchShape, seconds: float) -> None:
        """Count a replay. The shape is given up if replays are not faster."""
        self._batches += 1
        record = self._records[shape]
        record.seen += 1
        if len(record.replayed) < _TRIALS:
            record.replayed.append(seconds)
            if len(record.replayed) == _TRIALS and not self._pays(record):
                record.state = "refused"

    def _pays(self, record: _ShapeRecord) -> bool:
        return statistics.median(record.direct) >= _FASTER * statistics.median(record.replayed)
