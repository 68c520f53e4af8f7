"""What the forward passes of a network did: their time, and the arithmetic that the real tokens need. No I/O."""

from __future__ import annotations

import importlib
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headrace.device.memory import AvailableMemory, PeakMeter

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NetworkSize:
    """What one pass over a network takes."""

    multiplied: int
    """Weights that each token is multiplied with."""
    attention: int
    """Hidden size times layers: a pair of tokens takes four times as many operations, for scores and for values."""
    weight_bytes: int
    """Read from memory by each pass."""

    def operations(self, lengths: Sequence[int] | NDArray[numpy.integer]) -> float:
        """Floating-point operations for texts of these lengths, padding not counted."""
        import numpy as np

        real = np.asarray(lengths, np.float64)
        return float(2.0 * self.multiplied * real.sum() + 4.0 * self.attention * (real @ real))


class Forwarded(NamedTuple):
    """The sum over some forward passes."""

    passes: int = 0
    seconds: float = 0.0
    operations: float = 0.0
    weight_bytes: float = 0.0
    replayed: int = 0
    """Passes that were replays of captured work."""

    def plus(self, later: Forwarded) -> Forwarded:
        """With what was done after it."""
        return Forwarded(*map(operator.add, self, later))

    def since(self, earlier: Forwarded) -> Forwarded:
        """Without what was done before."""
        return Forwarded(*map(operator.sub, self, earlier))


class ForwardMeter:
    """Adds up forward passes; thread-safe.

    Args:
        gpu: the GPU's name for NVML; empty for a CPU.
        memory: the limit of the device's own memory, and a meter of its peak; None for a CPU.
    """

    def __init__(
        self,
        size: NetworkSize | None,
        gpu: str = "",
        memory: Callable[[], tuple[AvailableMemory, PeakMeter]] | None = None,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.gpu = gpu
        self.memory = memory
        self.no_graphs = ""
        """Why passes are not replayed; empty if they may be, or never could."""
        self._size = size
        self._lock = threading.Lock()
        self._sum = Forwarded()

    def add(self, seconds: float, lengths: Sequence[int] | NDArray[numpy.integer], replayed: bool = False) -> None:
        """Count a pass over texts of these lengths."""
        operations = 0.0 if self._size is None else self._size.operations(lengths)
        moved = 0 if self._size is None else self._size.weight_bytes
        with self._lock:
            self._sum = self._sum.plus(Forwarded(1, seconds, operations, moved, int(replayed)))

    def device_peaks(self, dtype: str) -> Mapping[str, float]:
        """Operations and bytes per second that the device reaches, measured now; see `native.peaks`."""
        native = importlib.import_module("headrace.device.native")  # imports PyTorch
        return dict(native.peaks(self.device, dtype))

    def read(self) -> Forwarded:
        with self._lock:
            return self._sum
