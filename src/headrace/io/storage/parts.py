"""Parts of an output: files named after the input positions that they contain.

`part-<start>-<end><suffix>` contains the finished rows of the positions start..end-1 in input order. Its twin in the
working folder contains the failed ones, and in its name the part's seal (`io/storage/checksums.py`). The rename of the
part, or in an object store its single put, is the commit point. The twin is durable before that; without its part it is
ignored.

The output folder contains only committed parts. Incomplete files are in the working folder, under a hidden name, as are
parts without rows, which some readers reject as broken.

The last write of a killed process may arrive in a store after another process has listed the parts and continued. Such
a part overlaps others: the next run removes one of them and processes its positions again.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.columns import FinishedPiece
from headrace.errors import BrokenOffError, JobError, attempted
from headrace.io.base import PartWriter
from headrace.io.storage.atomic import atomic_file, sweep, sync_folder, target_of
from headrace.io.storage.checksums import Damage, Seal, digest_of, hex_of, listed, new_digest, rows_in
from headrace.io.storage.checksums import Interval as Interval
from headrace.io.storage.locations import file_names, file_sizes, is_remote, remove, store, with_retries
from headrace.io.storage.unwritable import writable
from headrace.records import Failed, Ok

_NAME = re.compile(r"part-(\d{12,})-(\d{12,})(\..+)")
_UNSEALED = ".errors.jsonl"
_READERS = 8
"""Parts that are checked concurrently."""
READ_AT_ONCE_BYTES = 1 << 30
"""Up to this size, a resume reads all earlier parts. Beyond it, sizes are checked first and content at the end."""


@dataclass(frozen=True, slots=True)
class Written:
    """What `PartFolder.write` has committed."""

    size: int
    """Bytes of the part and its dead letters."""
    failed: int
    unwritable: Sequence[Failed]
    """The failed records that could not be encoded."""
    nulled: int
    """NaN and infinities written as null."""
    encoded_at: float
    """`time.monotonic()` before the part was written."""


def _rows(pieces: Sequence[FinishedPiece]) -> list[Ok]:
    return [row for piece in pieces for row in piece.rows()]


def put_together(letters: Sequence[Path], target: Path, work: Path | None = None) -> None:
    """Write files of dead letters one after the other to one file; no file if there are none."""
    if not letters:
        remove(target_of(target))
        return
    with atomic_file(target, work) as out:
        for path in letters:
            with path.open("rb") as file:
                shutil.copyfileobj(file, out, 1024 * 1024)


class PartFolder:
    """The committed parts of one output format in a folder. One process at a time may write to it.

    Args:
        suffix: the end of the parts' names.
        work: the folder of twins and incomplete files, if different.
        guard: called before each commit; raises if this process may no longer write.
        on_commit: called after each commit with the part and its bytes.
    """

    def __init__(
        self,
        path: Path,
        suffix: str,
        work: Path | None = None,
        guard: Callable[[], None] = lambda: None,
        on_commit: Callable[[Interval, int], None] = lambda _part, _size: None,
    ) -> None:
        self.path = path
        self._work = work or path
        self._suffix = suffix
        self._guard = guard
        self._on_commit = on_commit
        self._stale: dict[Interval, list[str]] | None = None
        self._known: set[str] = set()
        """In a store: the names at the start and those committed since."""
        self._unread: set[Interval] = set()
        """Parts of earlier runs with only the size checked."""
        self._rowless: set[Interval] = set()
        """Known parts in the working folder."""

    def committed(self) -> list[Interval]:
        """The intervals of all committed parts, ascending."""
        found = self._named(self.path)
        self._rowless = self._named(self._work) - found
        return sorted(found | self._rowless)

    def _named(self, folder: Path) -> set[Interval]:
        matches = (_NAME.fullmatch(name) for name in file_names(folder))
        return {Interval(int(m[1]), int(m[2])) for m in matches if m and m[3] == self._suffix}

    def other_suffix(self) -> str:
        """The suffix of parts here of another format; empty if there are none."""
        names = [name for folder in {self.path, self._work} for name in file_names(folder)]
        suffixes = {match[3] for name in names if (match := _NAME.fullmatch(name))}
        return min((one for one in suffixes - {self._suffix} if not one.endswith((".errors", _UNSEALED))), default="")

    def check(self, intervals: Sequence[Interval], read: Collection[Interval] = ()) -> list[Damage]:
        """The damaged parts: checks sizes, and rows or digests of those in `read`."""
        twins = self._twins_there()
        work_sizes = file_sizes(self._work)
        sizes = work_sizes | file_sizes(self.path)

        def reason(interval: Interval) -> str:
            size = sizes.get(self.part_path(interval).name)
            if size is None:
                return "it is missing"
            seals = [seal for name in twins.get(interval, ()) if (seal := Seal.parse(name))]
            if not seals:
                return self._row_problem(interval, twins.get(interval, ())) if interval in read else ""
            fitting = [seal for seal in seals if seal.size == size]
            if not fitting:
                return f"{size:,} bytes; {seals[0].size:,} when it was committed"
            fitting = [seal for seal in fitting if work_sizes.get(seal.name) == seal.error_size]
            if not fitting:
                return "its dead letters have changed"
            if interval in read and not any(map(self._is_as_sealed, fitting)):
                return "its content has changed: another checksum"
            return ""

        with ThreadPoolExecutor(_READERS, "headrace-check") as pool:
            reasons = list(pool.map(reason, intervals) if read else map(reason, intervals))
        return [Damage(self.part_path(i), i, found) for i, found in zip(intervals, reasons, strict=True) if found]

    def _row_problem(self, interval: Interval, twins: Sequence[str]) -> str:
        """The problem of a part without a seal; empty if none."""
        rows = rows_in(self.part_path(interval))
        failed = sum(rows_in(self._work / name) or 0 for name in twins)
        expected = interval.end - interval.start - failed
        return "" if rows == expected else f"{'no' if rows is None else f'{rows:,}'} rows; {expected:,} are its share"

    def _is_as_sealed(self, seal: Seal) -> bool:
        twins = [self._work / seal.name] if seal.error_size else []
        try:
            return digest_of(self.part_path(seal.interval), *twins, like=seal.digest) == seal.digest
        except FileNotFoundError:
            return False

    def take_over(self, damaged: Sequence[Damage] = ()) -> list[Interval]:
        """The committed parts at the start of a run, which is the only writer from now on.

        Removes incomplete files of killed processes and damaged parts. In a store, also removes one of two overlapping
        parts, which cannot occur in a local folder.
        """
        self.sweep()
        self.discard(damaged)
        kept = self._without_overlap(self.committed()) if is_remote(self.path) else self.committed()
        self._known = {path.name for path in (*map(self.part_path, kept), *self._twin_paths(kept))}
        return kept

    def _without_overlap(self, found: Sequence[Interval]) -> list[Interval]:
        """Remove one of two overlapping parts, preferably one without a twin."""
        twins = self._twins_there()
        kept: list[Interval] = []
        for interval in found:
            if kept and interval.start < kept[-1].end:
                loser = kept.pop() if interval in twins and kept[-1] not in twins else interval
                self._guard()
                remove(self.part_path(loser))
                if loser == interval:
                    continue
            kept.append(interval)
        return kept

    def resume(self) -> tuple[list[Interval], list[Damage]]:
        """`take_over` for a resumed job: also checks earlier parts and returns the damaged ones."""
        found = self.committed()
        sizes = file_sizes(self.path)
        readable = sum(sizes.get(self.part_path(interval).name, 0) for interval in found) <= READ_AT_ONCE_BYTES
        damaged = self.check(found, set(found) if readable else ())
        kept = self.take_over(damaged)
        self._unread = set() if readable else set(kept)
        return kept, damaged

    def discard(self, damaged: Sequence[Damage]) -> None:
        """Remove damaged parts, so that their records are processed again."""
        for damage in damaged:
            self._guard()
            remove(damage.path)
        if damaged:
            sync_folder(self.path)

    def close(self, *, read_all: bool) -> list[Interval]:
        """The committed parts at the end of a run. In a store, removes parts that others wrote since `take_over`.

        Args:
            read_all: check the content of all parts, not only of unchecked ones.

        Raises:
            BrokenOffError: parts are damaged; they are removed, and the next run creates them again.
        """
        if is_remote(self.path):
            for folder in {self.path, self._work}:
                for name in set(file_names(folder)) - self._known:
                    if _NAME.fullmatch(name):
                        self._guard()
                        remove(folder / name)
        committed = self.committed()
        if damaged := self.check(committed, set(committed) if read_all else self._unread):
            self.discard(damaged)
            raise BrokenOffError(
                f"{listed(damaged)}: damaged since it was committed, and now removed; run again to compute it again"
            )
        return committed

    def write(self, interval: Interval, pieces: Sequence[FinishedPiece], writer: PartWriter) -> Written:
        """Encode a part and commit it. A record that cannot be encoded fails.

        Raises:
            OSError, JobError: see `commit`, and `PartWriter.encode`.
        """
        failures = [failed for piece in pieces for failed in piece.failed]
        unwritable: list[Failed] = []
        before = writer.nulled
        encoded: bytes | BaseException | None = self._by_column(pieces, writer)
        if encoded is None:
            before = writer.nulled
            encoded = attempted(
                writer.encode_rows, _rows(pieces)
            )  # a library's or an object's methods may raise anything
        if isinstance(encoded, JobError):
            raise encoded
        if isinstance(encoded, BaseException):
            rows, bad = writable(_rows(pieces), writer.encode_rows)
            unwritable = [Failed.of(row.as_read, error, 1) for row, error in bad]
            failures = sorted([*failures, *unwritable], key=lambda failed: failed.record.position)
            before = writer.nulled
            encoded = writer.encode_rows(rows)
        nulled = writer.nulled - before
        letters = writer.encode_failures(failures)
        encoded_at = time.monotonic()
        self.commit(interval, encoded, letters)
        return Written(len(encoded) + len(letters), len(failures), unwritable, nulled, encoded_at)

    def _by_column(self, pieces: Sequence[FinishedPiece], writer: PartWriter) -> bytes | JobError | None:
        """The rows of a part, encoded by column; None if they must be encoded one by one."""
        for kind in type(writer).__mro__:  # a subclass that has its own rows must not be passed over
            if "encode_columns" in vars(kind):
                break
            if "encode" in vars(kind):
                return None
        columns = [piece.columns for piece in pieces if len(piece) > len(piece.failed)]
        given = [one for one in columns if one is not None]
        if not given or len(given) < len(columns):
            return None
        fields = writer.fields
        encoded = attempted(lambda: writer.encode_columns(given if fields is None else [*map(fields.rows, given)]))
        return encoded if isinstance(encoded, (bytes, JobError)) else None

    def commit(self, interval: Interval, rows: bytes, failures: bytes) -> None:
        """Commit a part atomically and durably.

        Raises:
            OSError: the folder cannot be written, or is full; the part is not committed.
            JobError: another process has taken over the output.
        """
        self._guard()
        digest = new_digest()
        digest.update(rows)
        digest.update(failures)
        done = interval.end - interval.start - failures.count(b"\n")
        seal = Seal(interval, done, len(rows), len(failures), hex_of(digest))
        if failures or is_remote(self._work):
            self._write(self._work / seal.name, failures)
        else:  # not synced: losing it in a power failure only loses a check
            (self._work / seal.name).write_bytes(b"")
        self._remove_stale_twins(seal)
        if not seal.rows:
            self._rowless.add(interval)
        self._write(self.part_path(interval), rows)
        self._on_commit(interval, len(rows))

    def _write(self, path: Path, content: bytes) -> None:
        if is_remote(path):
            fs, address = store(path)
            with_retries(lambda: fs.pipe_file(address, content))()
            self._known.add(path.name)
        else:
            with atomic_file(path, self._work) as file:
                file.write(content)

    def _remove_stale_twins(self, seal: Seal) -> None:
        """Remove twins of earlier attempts with other failed records; lists the folder once."""
        if self._stale is None:
            self._stale = self._twins_there()
        for name in self._stale.pop(seal.interval, ()):
            if name != seal.name:
                remove(self._work / name)

    def part_path(self, interval: Interval) -> Path:
        """The path of a committed part."""
        return (self._work if interval in self._rowless else self.path) / f"{interval.stem}{self._suffix}"

    def merge_errors(self, target: Path, of: Sequence[Interval] | None = None, work: Path | None = None) -> None:
        """Write all dead letters (or those of some parts) to one file in input order; no file if there are none.

        `work` is the folder of the incomplete file, as for `atomic_file`.
        """
        put_together(self.twins(self.committed() if of is None else of), target, work)

    def count_errors(self, of: Sequence[Interval] | None = None) -> int:
        """The number of dead letters of all committed parts, or of some."""
        count = 0
        for twin in self._twin_paths(self.committed() if of is None else of):
            seal = Seal.parse(twin.name)
            count += seal.failed if seal else rows_in(twin) or 0
        return count

    def twins(self, intervals: Sequence[Interval]) -> list[Path]:
        """The non-empty dead-letter files of these parts."""
        seals = ((path, Seal.parse(path.name)) for path in self._twin_paths(intervals))
        return [path for path, seal in seals if seal is None or seal.error_size]

    def _twin_paths(self, intervals: Sequence[Interval]) -> list[Path]:
        twins = self._twins_there()
        names = (self._own_twin(twins[interval]) for interval in intervals if interval in twins)
        return [self._work / name for name in names]

    def _own_twin(self, names: Sequence[str]) -> str:
        """The twin that a part was committed with; there may be another while a retry finishes."""
        if len(names) > 1:
            seals = [seal for name in names if (seal := Seal.parse(name))]
            return next((seal.name for seal in seals if self._is_as_sealed(seal)), names[0])
        return names[0]

    def _twins_there(self) -> dict[Interval, list[str]]:
        twins: defaultdict[Interval, list[str]] = defaultdict(list)
        for name in file_names(self._work):
            if (seal := Seal.parse(name)) is not None:
                twins[seal.interval].append(name)
            elif name.endswith(_UNSEALED) and (match := _NAME.fullmatch(name)):
                twins[Interval(int(match[1]), int(match[2]))].append(name)
        return dict(twins)

    def settle(self) -> None:
        """Remove what a retry has replaced: old twins, and rowless parts that have rows now."""
        if self._work != self.path:
            for interval in self._named(self._work) & self._named(self.path):
                remove(self._work / f"{interval.stem}{self._suffix}")
        self.committed()
        for names in self._twins_there().values():
            own = self._own_twin(names)
            for name in names:
                if name != own:
                    remove(self._work / name)

    def clear(self) -> None:
        """Remove all parts, twins and incomplete files."""
        self.sweep()
        for folder in {self.path, self._work}:
            for name in file_names(folder):
                if _NAME.fullmatch(name):
                    remove(folder / name)
            sync_folder(folder)
        self._known.clear()

    def sweep(self) -> None:
        """Remove incomplete files of killed processes."""
        sweep(self._work)
        if self._work != self.path:
            sweep(self.path, _NAME)
