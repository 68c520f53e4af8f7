"""The seam between a task and what computes it: named arrays in, one array of rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
Rows: TypeAlias = NDArray[np.float32]

# A padded budget of 1,024 tokens was the fastest of 256 to 8,192 on CPUs: larger batches leave the cache. A GPU needs
# far more work in flight to be busy.
BATCH_TOKENS = {"cpu": 1_024, "cuda": 65_536}
BATCH_TEXTS = {"cpu": 256, "cuda": 2_048}
BATCH_IMAGES = {"cpu": 8, "cuda": 256}


class Network(Protocol):
    """A loaded model, whatever runs it."""

    kind: str
    """"cpu" or "cuda"."""
    inputs: frozenset[str]
    """Names of the arrays it takes."""
    tolerance: float
    """How far its numbers may be off by the shape of a batch, as a part of the largest: its arithmetic is not exact."""
    by_length: bool
    """Whether it computes long and short batches in different ways."""

    def describe(self) -> Mapping[str, object]:
        """JSON-able facts that decide its numbers."""
        ...

    def run(self, arrays: Arrays) -> Rows:
        """The output of every row of the arrays, float32, in order.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device.
            EngineDeadError: the device failed, or the network is closed.
        """
        ...

    def close(self) -> None:
        """Free its memory. Safe to call twice."""
        ...
