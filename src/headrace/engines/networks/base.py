"""The interface between a task and the runtime of its model: named arrays in, one array of rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.device.forward import ForwardMeter
from headrace.device.pipeline import Arrays, OutputRows
from headrace.engines.capabilities import Sleeper

# On CPUs, a padded budget of 1,024 tokens was the fastest of 256 to 8,192: larger batches do not fit in the cache. A
# GPU needs far larger batches to be busy.
BATCH_TOKENS = {"cpu": 1_024, "cuda": 65_536}
BATCH_TEXTS = {"cpu": 256, "cuda": 2_048}
BATCH_IMAGES = {"cpu": 8, "cuda": 256}


class Network(Protocol):
    """A loaded model in any runtime."""

    kind: str
    """"cpu" or "cuda"."""
    inputs: frozenset[str]
    """Names of the input arrays."""
    tolerance: float
    """How much outputs may vary with the shape of a batch, as a fraction of the largest, due to rounding."""
    by_length: bool
    """Whether it computes long and short batches differently."""

    overlaps: bool
    """Whether a second call of `run`, on another thread, copies its batch while the first one computes."""

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves it to host memory; None if that is not possible, or pointless as on a CPU."""
        ...

    @property
    def meter(self) -> ForwardMeter | None:
        """Counts its forward passes; None if it does not."""
        ...

    def describe(self) -> Mapping[str, object]:
        """JSON-serializable facts that determine its outputs."""
        ...

    def hardware(self) -> Mapping[str, object]:
        """JSON-able facts that decide how fast it is, beside the CPU."""
        ...

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device is in other types; empty for none."""
        ...

    def length_for(self, texts: int, longest: int) -> int:
        """The length to pad a batch to: that of its longest text, or a little more for a shape that is faster."""
        ...

    def run(self, arrays: Arrays) -> OutputRows:
        """One output row per input row, float32, in order.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device.
            EngineDeadError: the device failed, or the network is closed.
        """
        ...

    def close(self) -> None:
        """Free its memory. Safe to call twice."""
        ...


class NetworkEngine:
    """What all engines on a network have in common."""

    network: Network

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self.network.sleeper

    def hardware(self) -> Mapping[str, object]:
        """JSON-able facts that decide how fast it is, beside the CPU."""
        return self.network.hardware()

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device is in other types; empty for none."""
        return self.network.dtype_speeds()

    def forward_meter(self) -> ForwardMeter | None:
        """What its forward passes did so far; None if that is not measured."""
        return self.network.meter

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self.network.close()
