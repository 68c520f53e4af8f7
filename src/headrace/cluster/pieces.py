"""How a job's records are cut into pieces for workers, and what becomes of a piece whose worker died. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.jobs.stages import Work

IN_FLIGHT = 3
"""Pieces a worker has at a time: while it runs one, the next is there and the one before is on its way back."""
MOST = 1024
"""Records of a piece."""
_PIECE_S = 0.5
"""A piece is to take a worker about so long: what its death costs, and what the others wait for at the end."""
_DEATHS = 3
"""Workers that must have died with a record before it is given up, the last of them with this record alone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Records that go to a worker together."""

    work: Sequence[Work]
    deaths: int = 0
    """Workers that died while they had it. From the first on, it is given to a worker that has nothing else."""
    cut: bool = False
    """Whether it is a portion of one that killed a worker alone."""


def after_death(piece: Piece, *, alone: bool) -> list[Piece]:
    """What is to be tried now that a worker has died with this piece; nothing if its one record is to be given up.

    A piece that had company may be innocent: it is tried as it is, alone. One that was alone holds the culprit, if
    there is one: it is cut up, first into about as many portions as these have records, then into single records. So
    one bad record costs at most four workers, whatever the size of the piece.
    """
    deaths = piece.deaths + 1
    count = len(piece.work)
    if not alone:
        return [replace(piece, deaths=deaths)]
    if count == 1:
        return [] if deaths >= _DEATHS else [replace(piece, deaths=deaths)]
    size = 1 if piece.cut else math.isqrt(count)
    return [Piece(piece.work[start : start + size], deaths, cut=True) for start in range(0, count, size)]


class PieceSize:
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
