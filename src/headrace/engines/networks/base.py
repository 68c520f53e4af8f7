"""The interface between a task and the runtime of its model: named arrays in, one array of rows out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.columns import RowNumbers
from headrace.device.forward import ForwardMeter
from headrace.device.pipeline import Arrays, OutputRows
from headrace.engines.capabilities import BesideLane, Sleeper

ItemT = TypeVar("ItemT")
OutputT = TypeVar("OutputT")

BATCH_TOKENS = {"cpu": 1_024, "cuda": 65_536}
"""The most tokens of a batch. On CPUs, 1,024 were the fastest of 256 to 8,192 with MiniLM: larger batches do not fit in
the cache. A GPU needs far larger ones to be busy."""
BATCH_IMAGES = {"cpu": 8, "cuda": 256}


class TextBatch(Protocol):
    """Texts from which a network makes its input arrays."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def take(self, rows: RowNumbers) -> Self: ...

    def padded(self, length: int | None = None) -> Arrays:
        """Arrays of shape (texts, length); None for the length of the longest text."""
        ...

    def packed(self, length: int) -> Arrays:
        """Arrays of shape (length,): the tokens of all texts in a row, and what fills it. Positions count from 0."""
        ...


class Network(Protocol):
    """A loaded model in any runtime."""

    kind: str
    """"cpu" or "cuda"."""
    inputs: frozenset[str]
    """Names of the input arrays."""
    batch_tokens: int
    """The most tokens of a batch of texts that is computed at a good speed."""
    tolerance: float
    """How much outputs may vary with the shape of a batch, as a fraction of the largest, due to rounding."""
    by_length: bool
    """Whether it computes long and short batches differently."""
    no_packing: str
    """Why texts must be padded; empty if they can be tried in a row."""

    overlaps: bool
    """Whether a second call of `run`, on another thread, copies its batch while the first one computes."""

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves it to host memory; None if that is not possible, or pointless as on a CPU."""
        ...

    @property
    def beside(self) -> BesideLane | None:
        """Computes short batches beside large ones; None if it computes one at a time."""
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

    def run(self, arrays: Arrays) -> OutputRows:
        """One output row per input row, float32, in order.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device.
            EngineDeadError: the device failed, or the network is closed.
        """
        ...

    def run_texts(self, batch: TextBatch, packed: bool) -> OutputRows:
        """One row per text, or per token, float32, in order. Errors as `run`.

        `packed` may be set where `no_packing` is empty.
        """
        ...

    def close(self) -> None:
        """Free its memory. Safe to call twice."""
        ...


def in_groups(
    items: Sequence[ItemT], key: Callable[[ItemT], object], run: Callable[[list[ItemT]], Sequence[OutputT]]
) -> list[OutputT]:
    """One output for each item, in order; those of one key run together."""
    places: dict[object, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(key(item), []).append(place)
    found: dict[int, OutputT] = {}
    for some in places.values():
        found.update(zip(some, run([items[place] for place in some]), strict=True))
    return [found[place] for place in range(len(items))]


class NetworkEngine:
    """What all engines on a network have in common."""

    network: Network

    @property
    def sleeper(self) -> Sleeper | None:
        return self.network.sleeper

    @property
    def beside(self) -> BesideLane | None:
        return self.network.beside

    def hardware(self) -> Mapping[str, object]:
        return self.network.hardware()

    def dtype_speeds(self) -> Mapping[str, float]:
        return self.network.dtype_speeds()

    def forward_meter(self) -> ForwardMeter | None:
        return self.network.meter

    def close(self) -> None:
        self.network.close()
