"""The way of a batch through a device: copied in, computed, copied out. The device does the work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
"""The inputs of a network by name, one row per record."""
OutputRows: TypeAlias = NDArray[np.float32]
"""The output of a network: one row per record, or per token."""
NetworkCall: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], torch.Tensor]"


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch that came out."""

    rows: OutputRows
    seconds: float
    """How long the device computed, copies not counted."""
    replayed: bool = False
    """Whether the work was captured before."""


class DeviceBatch(Protocol):
    """A batch on a device. It holds the memory that its queued work uses."""

    def compute(self, call: NetworkCall) -> None:
        """Queue the model's work, for when the batch is there."""
        ...

    def copy_out(self) -> None:
        """Queue the copy of the output, for when it is computed."""
        ...

    def wait(self) -> Computed:
        """Wait for this batch alone. Raises what the device raised meanwhile."""
        ...


class Streams(Protocol):
    """The queues of a device."""

    overlaps: bool
    """Whether it copies one batch while it computes another."""

    def copy_in(self, arrays: Arrays) -> DeviceBatch:
        """Queue the copy of a batch to the device."""
        ...

    def settle(self) -> None:
        """Wait until the device has done all it was given. Does not raise."""
        ...


class Pipeline:
    """Takes batches from several threads, and lets the copies of one overlap with the computing of another.

    The caller decides how many batches are in it. With two, the device always has the next one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._turn = threading.Lock()

    @property
    def overlaps(self) -> bool:
        """Whether a second batch in it saves time."""
        return self._streams.overlaps

    def begin(self, arrays: Arrays, call: NetworkCall) -> DeviceBatch:
        """Queue all work of a batch. One thread at a time calls the model."""
        with contextlib.ExitStack() as failed:
            # Its memory is about to be freed and given to another batch, but queued work may still use it.
            failed.callback(self._streams.settle)
            batch = self._streams.copy_in(arrays)
            with self._turn:
                batch.compute(call)
                batch.copy_out()
            failed.pop_all()
        return batch

    def run(self, arrays: Arrays, call: NetworkCall) -> Computed:
        """Take a batch through all stages."""
        return self.begin(arrays, call).wait()
