"""Tunes how many chunks are prepared at once, so that the engine does not wait."""

from __future__ import annotations

_LOOK_EVERY = 8
"""Chunks after which the balance is judged."""
_TOLERATED = 0.05
"""Tolerated waiting time, as a fraction of preparation time."""
_FIRST = 2


class ConcurrencyTuner:
    """Adds workers while the job waits for chunks and all workers are busy. Pure: takes durations, reads no clock."""

    def __init__(self, workers: int | None, cores: int) -> None:
        self.now = workers if workers is not None else min(_FIRST, cores)
        """Workers in use."""
        self.most = workers if workers is not None else max(cores, self.now)
        self._waited = self._preparing = 0.0
        self._chunks = 0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def prepared(self, seconds: float) -> None:
        self._preparing += seconds
        self._chunks += 1
        if self._chunks < _LOOK_EVERY:
            return
        share = self._preparing / self.now  # what the workers took side by side
        # Where reading is what takes the time, the wait is long and the workers are idle: more would not help.
        if self._waited > _TOLERATED * share and share > self._waited / 2:
            self.now = min(self.now + 1, self.most)
        self._waited = self._preparing = 0.0
        self._chunks = 0
