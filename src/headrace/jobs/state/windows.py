"""Windows: records that a job works on in another order than the input's, and how they return to it.

A window is a folder in the working folder. It holds `order`, the positions of its records in the order of work, which
is durable before work on them begins, and parts whose names count places in that order. When all places are committed,
the window's rows are written as parts of the output, in input order, and the folder is removed. So a kill loses no more
than in a job in input order, and the output is the same.

A window whose `order` is damaged is given up: its records are computed again.
"""

from __future__ import annotations

import json
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from headrace.errors import BrokenOffError
from headrace.io.base import PartWriter
from headrace.io.storage.checksums import Damage, new_digest
from headrace.io.storage.parts import Interval, PartFolder, atomic_file, listed, sync_folder
from headrace.jobs.state.ledger import Ledger

STRIDE = 1 << 40
"""Window n, counted from 1, has the places from n * STRIDE on, so that no part reaches from one window into another."""
_ORDER = "order"
_MAGIC = b"headrace order 1\n"
_GONE = ".gone"
_PART_ROWS = 4096


class Window:
    """The records of one window, and what of them is committed."""

    def __init__(self, number: int, positions: array[int], parts: PartFolder) -> None:
        self.number = number
        self.positions = positions
        """In the order of work."""
        self.parts = parts
        self.committed: list[Interval] = []
        """Of places in this window, from 0."""
        places = sorted(range(len(positions)), key=positions.__getitem__)
        self._sorted = array("Q", (positions[place] for place in places))
        self._places = array("Q", places)

    def place(self, position: int) -> int | None:
        """The place of a record in the order of work; None if it is not in this window."""
        found = bisect_left(self._sorted, position)
        if found == len(self._sorted) or self._sorted[found] != position:
            return None
        return self._places[found]

    @property
    def done(self) -> list[int]:
        """The positions of the committed records, ascending."""
        return sorted(self.positions[place] for start, end in self.committed for place in range(start, end))

    @property
    def left(self) -> int:
        """How many records are not committed."""
        return len(self.positions) - sum(end - start for start, end in self.committed)

    def lies_in(self, ledger: Ledger) -> bool:
        """Whether all its records are finished there."""
        return all(ledger.next_todo(position) != position for position in self._sorted)

    def overlaps(self, interval: Interval) -> bool:
        """Whether one of its records is in the interval."""
        return bisect_left(self._sorted, interval.start) < bisect_left(self._sorted, interval.end)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What earlier runs have left."""

    kept: list[Interval]
    """The parts of the output that count."""
    staged: list[Interval]
    """Positions that are finished in windows."""
    damaged: list[Damage]


class Windows:
    """All windows of a job. Takes the parts that a job commits, as `PartFolder` does.

    Positions that are in no window are places of the output itself.

    Args:
        folder: of the windows, on a local disk.
        output: the parts in input order.
        writer: of the output's format.
    """

    def __init__(self, folder: Path, output: PartFolder, writer: PartWriter) -> None:
        self._folder = folder
        self._output = output
        self._writer = writer
        self._open: dict[int, Window] = {}
        self._last = 0

    @property
    def path(self) -> Path:
        """The folder of the output's parts, for messages."""
        return self._output.path

    @property
    def open(self) -> list[Window]:
        """Windows with records that are not in the output yet, the oldest first."""
        return [self._open[number] for number in sorted(self._open.copy())]

    @property
    def staged(self) -> int:
        """How many records are committed in windows."""
        return sum(len(window.positions) - window.left for window in self.open)

    @property
    def staged_positions(self) -> list[Interval]:
        """The positions of these records."""
        return [Interval(position, position + 1) for window in self.open for position in window.done]

    @property
    def suffix(self) -> str:
        """The end of the parts' names."""
        return self._writer.suffix

    def others(self, committed: Sequence[Interval]) -> list[Interval]:
        """The parts of the output with no record of an open window: these are being put in order."""
        return [part for part in committed if not any(window.overlaps(part) for window in self.open)]

    def check(self, *, read: bool) -> list[Damage]:
        """The damaged parts of open windows; see `PartFolder.check`."""
        return [
            damage
            for window in self.open
            for damage in window.parts.check(window.committed, set(window.committed) if read else ())
        ]

    # -- beginning ---------------------------------------------------------------------------------------------------

    def load(self, committed: Sequence[Interval]) -> Loaded:
        """Continue with the windows of earlier runs; `committed` are the parts of the output."""
        damaged: list[Damage] = []
        kept = list(committed)
        self._open.clear()
        for gone in self._folder.glob(f"*{_GONE}"):  # a kill came while it was removed
            shutil.rmtree(gone, ignore_errors=True)
        for path in self._paths():
            parts = self._parts(path)
            try:
                positions = read_order(path / _ORDER)
            except (OSError, ValueError) as error:
                lost = parts.committed()
                if lost:
                    damaged.append(_lost(path / _ORDER, lost, error))
                self._remove(path)
                continue
            window = Window(int(path.name), positions, parts)
            if window.lies_in(Ledger(kept)):
                self._remove(path)
                continue
            window.committed, bad = parts.resume()
            damaged += bad
            self._open[window.number] = window
        again = set(kept) - set(self.others(kept))  # a kill came while a window was put in order
        self._output.discard([Damage(self._output.part_path(part), part, "") for part in again])
        kept = self.others(kept)
        self._last = max(self._open, default=0)
        for window in self.open:
            if not window.left:
                kept += self._restore(window)
        return Loaded(kept, self.staged_positions, damaged)

    def look(self) -> Windows:
        """Read what there is, without a change: a job may be running. Leaves out windows that cannot be read."""
        for path in self._paths():
            try:
                window = Window(int(path.name), read_order(path / _ORDER), self._parts(path))
            except (OSError, ValueError):
                continue
            window.committed = window.parts.committed()
            self._open[window.number] = window
        return self

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []

    def _parts(self, path: Path) -> PartFolder:
        return PartFolder(path, self._writer.suffix)

    def clear(self) -> None:
        """Remove all windows."""
        self._open.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- while the job runs ------------------------------------------------------------------------------------------

    def create(self, positions: Sequence[int]) -> Window:
        """A new window of these records, in the order of work. It is durable when this returns.

        Raises:
            OSError: the disk is full.
        """
        number = self._last + 1
        path = self._folder / f"{number:012d}"
        path.mkdir(parents=True)
        ordered = array("Q", positions)
        try:
            write_order(path / _ORDER, ordered)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        sync_folder(self._folder)
        sync_folder(self._folder.parent)  # the first window has made the folder of all
        window = Window(number, ordered, self._parts(path))
        self._last = number
        self._open[number] = window
        return window

    def place(self, position: int) -> int:
        """The place of a record in the order of work."""
        for window in list(self._open.values()):
            if (place := window.place(position)) is not None:
                return window.number * STRIDE + place
        return position

    def commit(self, interval: Interval, rows: bytes, failures: bytes) -> None:
        """Commit a part; puts a window into input order when its last place is committed.

        Raises:
            OSError: the folder cannot be written, or is full; the part is not committed.
            JobError: another process has taken over the output.
        """
        number = interval.start // STRIDE
        if not number:
            self._output.commit(interval, rows, failures)
            return
        window = self._open[number]
        places = Interval(interval.start - number * STRIDE, interval.end - number * STRIDE)
        window.parts.commit(places, rows, failures)
        window.committed.append(places)
        if not window.left:
            self._restore(window)

    def merge_errors(self, target: Path, work: Path | None = None) -> None:
        """Write all dead letters to one file, those of open windows last; no file if there are none."""
        self._output.merge_errors(target, work=work)
        letters = b"".join(line for window in self.open for _, line in sorted(_letters(window).items()))
        if letters:
            before = target.read_bytes() if target.exists() else b""
            with atomic_file(target, work) as file:
                file.write(before + letters)

    def count_errors(self) -> int:
        """The number of dead letters in open windows."""
        return sum(window.parts.count_errors(window.committed) for window in self.open)

    # -- back to input order -----------------------------------------------------------------------------------------

    def rearranged(self, window: Window, pieces: Sequence[Sequence[int]]) -> Iterator[tuple[bytes, bytes]]:
        """The rows and the dead letters of committed positions, for each of `pieces`.

        Needs memory for the rows of one window.
        """
        window.committed.sort()
        letters = _letters(window)
        places = chain.from_iterable(range(start, end) for start, end in window.committed)
        good = (window.positions[place] for place in places)
        row_of = {position: row for row, position in enumerate(p for p in good if p not in letters)}
        chosen = [[row_of[position] for position in piece if position in row_of] for piece in pieces]
        paths = [window.parts.part_path(interval) for interval in window.committed]
        for piece, rows in zip(pieces, self._writer.rearrange(paths, chosen), strict=True):
            yield rows, b"".join(letters[position] for position in piece if position in letters)

    def give_up(self) -> None:
        """Write what is committed in all windows to the output, and remove them: the job will not be continued."""
        for window in self.open:
            self._restore(window)

    def _restore(self, window: Window) -> list[Interval]:
        """Write the rows of a window to the output and remove the window."""
        if damaged := window.parts.check(window.committed, set(window.committed)):
            raise BrokenOffError(f"{listed(damaged)}: damaged since it was committed; run again to compute it again")
        written = []
        pieces = list(stretches(window.done, _PART_ROWS))
        for piece, (rows, failures) in zip(pieces, self.rearranged(window, pieces), strict=True):
            written.append(Interval(piece.start, piece.stop))
            self._output.commit(written[-1], rows, failures)
        del self._open[window.number]
        self._remove(window.parts.path)
        return written

    def _remove(self, path: Path) -> None:
        """Remove a window's folder, at once for all who look at its name."""
        gone = path.with_name(path.name + _GONE)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def stretches(positions: Sequence[int], most: int) -> Iterator[range]:
    """Ascending positions as ranges of consecutive ones, each of at most `most`."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1 or end - start == most:
            yield range(positions[start], positions[end - 1] + 1)
            start = end


def _letters(window: Window) -> dict[int, bytes]:
    """The dead letters of a window by position."""
    found: dict[int, bytes] = {}
    for twin in window.parts.twins(window.committed):
        for line in twin.read_bytes().splitlines(keepends=True):
            found[json.loads(line)["position"]] = line
    return found


def _lost(path: Path, lost: Sequence[Interval], error: Exception) -> Damage:
    why = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
    return Damage(path, Interval(0, sum(end - start for start, end in lost)), why)


def write_order(path: Path, positions: array[int]) -> None:
    """Write positions durably, with a checksum."""
    content = positions.tobytes()
    digest = new_digest()
    digest.update(content)
    with atomic_file(path) as file:
        file.write(_MAGIC + digest.digest() + content)


def read_order(path: Path) -> array[int]:
    """The positions in a file of `write_order`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or from another version.
    """
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError("it is damaged, or another version of Headrace has written it")
    digest, size = new_digest(), new_digest().digest_size
    sealed, body = content[len(_MAGIC) : len(_MAGIC) + size], content[len(_MAGIC) + size :]
    digest.update(body)
    if digest.digest() != sealed:
        raise ValueError("its content has changed: another checksum")
    positions = array("Q")
    positions.frombytes(body)
    return positions
