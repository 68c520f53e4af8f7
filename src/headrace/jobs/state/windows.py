"""Windows: records that a job works on in another order than the input's, and how they return to it.

A window is a folder in the working folder. It holds `order`, the positions of its records in the order of work, which
is durable before work on them begins, and parts whose names count places in that order. When all places are committed,
the window's rows are written as parts of the output, in input order, and the folder is removed. So a kill loses no more
than in a job in input order, and the output is the same.

The records of a window may lie anywhere in the input. Its rows would then become many small parts of the output.
Instead, the folder is replaced by one with the same rows in input order, whose name ends in `.sorted`. When the job
ends, all of these are merged into parts of the output.

A window whose `order` is damaged is given up: its records are computed again.
"""

from __future__ import annotations

import shutil
from array import array
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from headrace.columns import FinishedPiece
from headrace.errors import BrokenOffError
from headrace.io.base import PartWriter
from headrace.io.storage.atomic import atomic_file, sync_folder
from headrace.io.storage.checksums import Damage, listed
from headrace.io.storage.parts import Interval, PartFolder, Written
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.order_file import ORDER, read_order, write_order
from headrace.jobs.state.window import PART_ROWS, OpenWindow, SortedWindow, collated, stretches

STRIDE = 1 << 40
"""Window n, counted from 1, has the places from n * STRIDE on, so that no part reaches from one window into another."""
_GONE = ".gone"
_SORTING = ".sorting"
_SORTED = ".sorted"
_MORE_PARTS = 16
"""A window is written at once if it takes at most this many parts more than necessary, else it is sorted first."""


class Windows:
    """All windows of a job. Writes the parts of a job, as `PartFolder` does.

    Positions that are in no window are places of the output itself.

    Args:
        folder: of the windows, on a local disk.
        output: the parts in input order.
    """

    def __init__(self, folder: Path, output: PartFolder, writer: PartWriter) -> None:
        self._folder = folder
        self._output = output
        self._writer = writer
        self._open: dict[int, OpenWindow] = {}
        self._sorted: dict[int, SortedWindow] = {}
        self._last = 0

    @property
    def path(self) -> Path:
        """The folder of the output's parts, for messages."""
        return self._output.path

    @property
    def disk(self) -> Path:
        """An existing folder on the disk of the windows."""
        return self._folder.parent

    @property
    def open(self) -> list[OpenWindow]:
        """Windows with unfinished records, the oldest first."""
        return [self._open[number] for number in sorted(self._open.copy())]

    @property
    def all(self) -> list[OpenWindow | SortedWindow]:
        """Windows with records that are not in the output yet."""
        return [*self.open, *self._sorted.copy().values()]

    @property
    def staged(self) -> int:
        """How many records are committed in windows."""
        return sum(window.finished for window in self.all)

    @property
    def staged_positions(self) -> Iterator[Interval]:
        return (Interval(position, position + 1) for window in self.all for position in window.done)

    @property
    def suffix(self) -> str:
        return self._writer.suffix

    def others(self, committed: Sequence[Interval]) -> list[Interval]:
        """The parts of the output with no record of a window: the others are being put in order."""
        left = list(committed)
        for window in self.all if left else ():
            left = window.beside(left)
        return left

    def check(self, *, read: bool) -> list[Damage]:
        """The damaged parts of windows; see `PartFolder.check`."""
        return [
            damage
            for window in self.all
            for damage in window.parts.check(window.committed, set(window.committed) if read else ())
        ]

    # -- beginning ---------------------------------------------------------------------------------------------------

    def load(self, committed: Sequence[Interval]) -> tuple[Iterator[Interval], list[Damage]]:
        """Continue with the windows of earlier runs; `committed` are the parts of the output.

        Returns all positions that are finished, which may be read once, and the damaged parts.
        """
        damaged: list[Damage] = []
        self._open.clear()
        self._sorted.clear()
        paths = self._paths()
        self._sweep(set(paths.values()))
        finished = Ledger(committed)
        for number, path in paths.items():
            parts = self._parts(path)
            try:
                window = OpenWindow(number, read_order(path / ORDER), parts)
            except (OSError, ValueError) as error:
                if lost := parts.committed():
                    damaged.append(_lost(path / ORDER, lost, error))
                remove_at_once(path)
                continue
            if path.suffix != _SORTED and window.lies_in(finished):
                remove_at_once(path)
                continue
            window.committed, bad = parts.resume()
            damaged += bad
            if path.suffix == _SORTED and not window.left:
                self._sorted[number] = SortedWindow(path, self.suffix)
            else:
                self._open[number] = window
        kept = self.others(committed)  # a kill came while the others were put in order
        again = set(committed) - set(kept)
        self._output.discard([Damage(self._output.part_path(part), part, "") for part in again])
        self._last = max(paths, default=0)
        for window in self.open:
            if not window.left:
                kept += self._close(window)
        return chain(kept, self.staged_positions), damaged

    def look(self) -> Windows:
        """Read what there is, without a change: a job may be running. Leaves out windows that cannot be read."""
        for number, path in self._paths().items():
            try:
                positions = read_order(path / ORDER)
                if path.suffix == _SORTED:
                    self._sorted[number] = SortedWindow(path, self.suffix)
                    continue
            except (OSError, ValueError):
                continue
            window = self._open[number] = OpenWindow(number, positions, self._parts(path))
            window.committed = window.parts.committed()
        return self

    def _paths(self) -> dict[int, Path]:
        """The folder of each window by its number; of two, the sorted one, which is complete."""
        try:
            found = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return {}
        windows = [path for path in found if path.stem.isdecimal() and path.suffix in ("", _SORTED)]
        return {int(path.stem): path for path in windows}

    def _sweep(self, windows: set[Path]) -> None:
        """Remove what a killed process has left, and the windows that were replaced by sorted ones."""
        gone = self._folder.with_name(self._folder.name + _GONE)
        for path in {gone, *self._folder.glob("*")} - windows:
            shutil.rmtree(path, ignore_errors=True)

    def _parts(self, path: Path) -> PartFolder:
        return PartFolder(path, self._writer.suffix)

    def clear(self) -> None:
        self._open.clear()
        self._sorted.clear()
        if self._folder.exists():
            remove_at_once(self._folder)

    # -- while the job runs ------------------------------------------------------------------------------------------

    def create(self, positions: Sequence[int]) -> OpenWindow:
        """A new window of these records, in the order of work. It is durable when this returns.

        Raises:
            OSError: the disk is full.
        """
        number = self._last + 1
        path = self._folder / f"{number:012d}"
        path.mkdir(parents=True)
        ordered = array("Q", positions)
        try:
            write_order(path / ORDER, ordered)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        sync_folder(self._folder)
        sync_folder(self._folder.parent)  # the first window has made the folder of all
        window = OpenWindow(number, ordered, self._parts(path))
        self._last = number
        self._open[number] = window
        return window

    def place(self, position: int) -> int:
        for window in list(self._open.values()):
            if (place := window.place(position)) is not None:
                return window.number * STRIDE + place
        return position

    def write(self, interval: Interval, pieces: Sequence[FinishedPiece], writer: PartWriter) -> Written:
        """`PartFolder.write`; puts a window into input order when its last place is committed."""
        number = interval.start // STRIDE
        if not number:
            return self._output.write(interval, pieces, writer)
        window = self._open[number]
        places = Interval(interval.start - number * STRIDE, interval.end - number * STRIDE)
        written = window.parts.write(places, pieces, writer)
        window.committed.append(places)
        if not window.left:
            self._close(window)
        return written

    def merge_errors(self, target: Path, work: Path | None = None) -> None:
        """Write all dead letters to one file, those of windows last; no file if there are none."""
        self._output.merge_errors(target, work=work)
        letters = b"".join(line for _, line in sorted(chain.from_iterable(window.letters() for window in self.all)))
        if letters:
            before = target.read_bytes() if target.exists() else b""
            with atomic_file(target, work) as file:
                file.write(before + letters)

    def count_errors(self) -> int:
        return sum(window.parts.count_errors(window.committed) for window in self.all)

    # -- back to input order -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write all sorted windows to the output, and remove them.

        Raises:
            OSError: the folder cannot be written, or is full.
            BrokenOffError: a part is damaged.
        """
        if self._sorted:
            for window in self._sorted.values():
                _check(window)
            for interval, rows, failures in collated(list(self._sorted.values()), self._writer, _follows):
                self._output.commit(interval, rows, failures)
        self.clear()

    def give_up(self) -> None:
        """Write what is committed in all windows to the output, and remove them: the job will not be continued."""
        for window in self.open:
            self._sort(window)
        self.finish()

    def pieces(self, committed: Sequence[Interval], scratch: Path) -> Iterator[tuple[Interval, bytes, bytes]]:
        """What is committed in windows, in input order, cut where a part of the output lies between. Changes nothing.

        Args:
            committed: the parts of the output.
            scratch: an empty folder.
        """
        windows = list(self._sorted.values())
        for window in self.open:
            folder = scratch / str(window.number)
            window.sort_into(folder, self._writer)
            windows.append(SortedWindow(folder, self.suffix))
        starts = [part.start for part in committed]
        return collated(windows, self._writer, lambda last, now: bisect(starts, last) == bisect(starts, now))

    def _close(self, window: OpenWindow) -> list[Interval]:
        """Write the rows of a finished window to the output, if they are not many small parts of it.

        Returns the parts of the output.
        """
        _check(window)
        pieces = list(stretches(window.done, PART_ROWS))
        if len(pieces) > len(window.positions) // PART_ROWS + _MORE_PARTS:
            self._sort(window)
            return []
        written = []
        for piece, (rows, failures) in zip(pieces, window.rearranged(self._writer, pieces), strict=True):
            written.append(Interval(piece.start, piece.stop))
            self._output.commit(written[-1], rows, failures)
        del self._open[window.number]
        remove_at_once(window.parts.path)
        return written

    def _sort(self, window: OpenWindow) -> None:
        """Put the committed rows of a window into input order, in another folder."""
        path = self._folder / f"{window.number:012d}"
        sorting, target = path.with_suffix(_SORTING), path.with_suffix(_SORTED)
        if window.parts.path != target or window.left:  # else a part of it was damaged, and is computed again now
            shutil.rmtree(sorting, ignore_errors=True)
            window.sort_into(sorting, self._writer)
            if window.parts.path == target:
                remove_at_once(target)
            sorting.rename(target)
            sync_folder(self._folder)
            if window.parts.path != target:
                remove_at_once(path)
        self._sorted[window.number] = SortedWindow(target, self.suffix)
        del self._open[window.number]


def remove_at_once(path: Path) -> None:
    """Remove a window's folder, at once for all who look at its name."""
    gone = path.with_name(path.name + _GONE)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _check(window: OpenWindow | SortedWindow) -> None:
    """Check the content of all parts of a window."""
    if damaged := window.parts.check(window.committed, set(window.committed)):
        raise BrokenOffError(f"{listed(damaged)}: damaged since it was committed; run again to compute it again")


def _follows(last: int, position: int) -> bool:
    return position == last + 1


def _lost(path: Path, lost: Sequence[Interval], error: Exception) -> Damage:
    why = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
    return Damage(path, Interval(0, sum(end - start for start, end in lost)), why)
