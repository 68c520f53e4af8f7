"""The way of a batch through a device: copied in, computed, copied out. Pure: the device does the work."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

ArraysT = TypeVar("ArraysT")
CallT = TypeVar("CallT")
RowsT = TypeVar("RowsT")
ArraysT_contra = TypeVar("ArraysT_contra", contravariant=True)
CallT_contra = TypeVar("CallT_contra", contravariant=True)
RowsT_co = TypeVar("RowsT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Computed(Generic[RowsT_co]):
    """A batch that came out."""

    rows: RowsT_co
    seconds: float
    """How long the device computed, copies not counted."""
    replayed: bool = False
    """Whether the work was captured before."""


class DeviceBatch(Protocol[CallT_contra, RowsT_co]):
    """A batch on a device. It holds the memory that its queued work uses."""

    def compute(self, call: CallT_contra) -> None:
        """Queue the model's work, for when the batch is there."""
        ...

    def copy_out(self) -> None:
        """Queue the copy of the output, for when it is computed."""
        ...

    def wait(self) -> Computed[RowsT_co]:
        """Wait for this batch alone. Raises what the device raised meanwhile."""
        ...


class Streams(Protocol[ArraysT_contra, CallT_contra, RowsT_co]):
    """The queues of a device."""

    overlaps: bool
    """Whether it copies one batch while it computes another."""

    def copy_in(self, arrays: ArraysT_contra) -> DeviceBatch[CallT_contra, RowsT_co]:
        """Queue the copy of a batch to the device."""
        ...

    def settle(self) -> None:
        """Wait until the device has done all it was given. Does not raise."""
        ...


class Pipeline(Generic[ArraysT, CallT, RowsT]):
    """Takes batches from several threads, and lets the copies of one overlap with the computing of another.

    The caller decides how many batches are in it. With two, the device always has the next one.
    """

    def __init__(self, streams: Streams[ArraysT, CallT, RowsT]) -> None:
        self._streams = streams
        self._turn = threading.Lock()

    @property
    def overlaps(self) -> bool:
        """Whether a second batch in it saves time."""
        return self._streams.overlaps

    def begin(self, arrays: ArraysT, call: CallT) -> DeviceBatch[CallT, RowsT]:
        """Queue all work of a batch. One thread at a time calls the model."""
        try:
            batch = self._streams.copy_in(arrays)
            with self._turn:
                batch.compute(call)
                batch.copy_out()
        except BaseException:
            # Its memory is about to be freed and given to another batch, but queued work may still use it.
            self._streams.settle()
            raise
        return batch

    def run(self, arrays: ArraysT, call: CallT) -> Computed[RowsT]:
        """Take a batch through all stages."""
        return self.begin(arrays, call).wait()
