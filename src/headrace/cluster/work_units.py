"""How large the pieces of a job's records are that workers get. Pure."""

from __future__ import annotations

IN_FLIGHT = 3
"""Pieces a worker has at a time: while it runs one, the next is there and the one before is on its way back."""
MOST = 1024
"""Records of a piece."""
_PIECE_S = 0.5
"""A piece is to take a worker about so long: what its death costs, and what the others wait for at the end."""


class WorkUnitSize:
    """How many records one worker's next piece is to have: what it does in half a second, as far as is known.

    Args:
        least: records that keep the engine busy at one time; a smaller piece would make its batches smaller.
    """

    def __init__(self, least: int) -> None:
        self.least = min(max(least, 1), MOST)
        self._rate: float | None = None
        self._records = 0
        self._seconds = 0.0

    def learn(self, records: int, seconds: float) -> None:
        """So many records came back, so many seconds after those before them."""
        self._records += records
        self._seconds += seconds
        if self._seconds >= _PIECE_S:  # pieces that share batches come back together: a gap alone says nothing
            rate = self._records / self._seconds
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._records, self._seconds = 0, 0.0

    @property
    def full(self) -> int:
        """The size where there is enough."""
        return self.least if self._rate is None else max(self.least, min(int(self._rate * _PIECE_S), MOST))

    def now(self, waiting: int, workers: int) -> int:
        """The size of the next piece, of so many records that wait.

        Where the input ends or is slow few wait, and pieces become smaller, so that all workers have some.
        """
        return min(self.full, max(self.least, -(-waiting // (2 * workers))))
