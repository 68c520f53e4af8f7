"""A device that only takes time, for tests and benchmarks of what overlaps with what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.device.pipeline import Computed

Items: TypeAlias = Sequence[object]
Model: TypeAlias = Callable[[Items], Items]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of each batch."""

    compute_s: float
    copy_in_s: float
    copy_out_s: float
    launch_s: float
    """For which the host queues kernels. The device begins with the first one."""
    kernels: int = 100


class SimulatedStreams:
    """Three queues, each of which does one thing at a time, and a host that launches kernels.

    Args:
        times: of all batches.
        clock: the present, in seconds.
        sleep: waits so many seconds.
    """

    overlaps = True

    def __init__(self, times: BatchTimes, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.times = times
        self.clock = clock
        self.sleep = sleep
        self.computed: list[tuple[float, float]] = []
        """When each batch was computed."""
        self.settled = 0
        """How often the device was waited for as a whole."""
        self._free_at = dict.fromkeys(("in", "compute", "out", "host"), 0.0)
        self._batches: weakref.WeakSet[SimulatedBatch] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Batches that hold memory."""
        return len(self._batches)

    @property
    def busy(self) -> float:
        """Share of the time that the device computed, from the first copy to the last."""
        wall = self._free_at["out"] - (self.computed[0][0] - self.times.copy_in_s)
        return sum(end - start for start, end in self.computed) / wall

    def copy_in(self, arrays: Items) -> SimulatedBatch:
        """Queue the copy of a batch to the device."""
        batch = SimulatedBatch(self, arrays, self.queue("in", self.times.copy_in_s, self.clock()))
        self._batches.add(batch)
        return batch

    def queue(self, name: str, seconds: float, after: float) -> float:
        """Add work to a queue that may begin at a moment; returns when it ends."""
        self._free_at[name] = max(self._free_at[name], after) + seconds
        return self._free_at[name]

    def settle(self) -> None:
        """Count a wait for the whole device."""
        self.settled += 1


class SimulatedBatch:
    """A batch on the device; `done_at` is when its output is on the host."""

    def __init__(self, streams: SimulatedStreams, arrays: Items, copied_at: float) -> None:
        self._streams = streams
        self._arrays = arrays
        self._copied_at = copied_at
        self.done_at = 0.0

    def compute(self, call: Model) -> None:
        """Queue the work. Raises what the model raises."""
        times, streams = self._streams.times, self._streams
        self._rows: Any = call(self._arrays)
        launched = streams.queue("host", times.launch_s, streams.clock())
        first = launched - times.launch_s * (1 - 1 / times.kernels)
        end = streams.queue("compute", times.compute_s, max(self._copied_at, first))
        streams.computed.append((end - times.compute_s, end))

    def copy_out(self) -> None:
        """Queue the copy of the output."""
        self.done_at = self._streams.queue("out", self._streams.times.copy_out_s, self._streams.computed[-1][1])

    def wait(self) -> Computed:
        """Wait for this batch alone."""
        self._streams.sleep(max(self.done_at - self._streams.clock(), 0.0))
        return Computed(self._rows, self._streams.times.compute_s)
