"""Selects part of an input: a shard, a random sample, or the first rows.

Selected rows are renumbered without gaps, so that finished rows remain a few intervals. A record without an id keeps
its position in the whole input as its id.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from headrace.argument_types import check_types, named
from headrace.errors import ConfigError
from headrace.io.base import Chunk, ColumnSource, Source, needing
from headrace.options import option
from headrace.records import Record

_END = sys.maxsize
_RUN = 4096
"""Rows sampled together, by a generator seeded with the run's number."""


def parse_shard(text: str) -> tuple[int, int]:
    """`i/n` as two numbers. Raises ConfigError: it is not of that form."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ConfigError(f"``shard`` is {text!r}; write i/n, such as 0/4 for the first of four")
    return int(index), int(count)


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows of an input a job takes.

    Shard lengths differ by at most one row, whatever the length of the input, which need not be known.
    """

    panel: ClassVar[str] = "Records"

    limit: int | None = option(
        None,
        "Process only the first records, up to this number. Default: all.",
        minimum=1,
        changes_output=True,
        brief="process only the first records",
    )
    sample: float | None = option(
        None,
        "Process each record with this probability, between 0.000001 and 1. Default: all.",
        minimum=1e-6,  # a random number is drawn for each record that is passed over
        maximum=1,
        changes_output=True,
    )
    sample_seed: int = option(0, "With ``sample``: the same seed selects the same records.", changes_output=True)
    shard: tuple[int, int] | None = option(
        None,
        "i/n: process every n-th record, starting at record i (0 to n-1). Default: all.",
        parse=parse_shard,
        changes_output=True,
    )

    def __post_init__(self) -> None:
        check_types(self)
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(f"``shard`` is {self.shard[0]}/{self.shard[1]}; it must be i/n with 0 <= i < n")

    @property
    def is_all(self) -> bool:
        """Whether it selects all rows."""
        return self.shard is None and self.sample is None and self.limit is None

    def describe(self) -> Mapping[str, object]:
        """The settings that determine the rows."""
        return {
            "shard": "{}/{}".format(*self.shard) if self.shard else None,
            "sample": self.sample,
            "sample_seed": self.sample_seed if self.sample is not None else None,
            "limit": self.limit,
        }


class SelectedSource:
    def __init__(self, source: Source, selection: Selection) -> None:
        self._source = source
        self._selection = selection
        self.total_bytes = source.total_bytes if selection.limit is None else None
        self.total_records = self._count(source.total_records)
        self.reads_once: bool = getattr(source, "reads_once", False)

    def _count(self, total: int | None) -> int | None:
        chosen = self._selection
        if total is not None and chosen.shard is not None:
            index, count = chosen.shard
            total = max(0, (total - index + count - 1) // count)
        if total is not None and chosen.sample is not None:
            total = None
        return total if chosen.limit is None or total is None else min(total, chosen.limit)

    def describe(self) -> Mapping[str, object]:
        """The whole input's description, with the selection."""
        return {**self._source.describe(), "selection": self._selection.describe()}

    def in_columns(self, names: Sequence[str]) -> Source:
        """The same rows, in columns if they are the first; the rows of shards and samples stay rows."""
        first = self._selection.shard is None and self._selection.sample is None
        if not first or not isinstance(self._source, ColumnSource):
            return self
        return _FirstRows(self._source.in_columns(names), self._selection)

    def needing(self, names: Sequence[str]) -> SelectedSource:
        """The same rows, which may lack other columns than these where those cannot be read."""
        return SelectedSource(needing(self._source, names), self._selection)

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        cursor = _Cursor(self._selection, next_todo)
        for chunk in self._source.chunks(cursor.next_wanted):
            records = [_renumber(record, cursor.numbers[record.position]) for record in chunk.records]
            failures = [
                replace(failed, record=_renumber(failed.record, cursor.numbers[failed.record.position]))
                for failed in chunk.failures
            ]
            yield replace(chunk, records=records, failures=failures)
            cursor.forget()
            if cursor.ended:
                return


class _FirstRows(SelectedSource):
    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        limit = self._selection.limit
        wanted, last = _Below(next_todo, _END if limit is None else limit), -1
        for chunk in self._source.chunks(wanted):
            yield chunk
            last = max(last, *(failed.record.position for failed in chunk.failures), -1)
            if chunk.records:
                last = max(last, chunk.records[-1].position if chunk.table is None else int(chunk.table.positions[-1]))
            if wanted.ended and last >= wanted.last:
                return


class _Below:
    """Unfinished positions below a bound."""

    def __init__(self, next_todo: Callable[[int], int], bound: int) -> None:
        self._next_todo = next_todo
        self._next_done: Callable[[int], int] = getattr(next_todo, "next_done", lambda position: position + 1)
        self._bound = bound
        self.last = -1
        """The last position that was given."""
        self.ended = False
        """Whether all were given."""

    def __call__(self, position: int) -> int:
        found = self._next_todo(position) if position < self._bound else _END
        if found >= self._bound:
            self.ended = True
            return _END
        self.last = max(self.last, found)
        return found

    def next_done(self, position: int) -> int:
        """The end of the run of given positions from `position` on."""
        found = min(self._next_done(position), self._bound)
        self.last = max(self.last, found - 1)
        self.ended = self.ended or found == self._bound
        return found


class _Cursor:
    """Iterates over the selected rows during one read of the input, in ascending order."""

    def __init__(self, selection: Selection, next_todo: Callable[[int], int]) -> None:
        self._shard = selection.shard or (0, 1)
        self._sampled = None if selection.sample is None else _places(selection, selection.sample)
        self._limit = _END if selection.limit is None else selection.limit
        self._next_todo = next_todo
        self._number = 0
        self._place = self._shard[0] if self._sampled is None else next(self._sampled)
        self.numbers: dict[int, int] = {}
        """New positions of the requested rows, by position in the whole input."""
        self._given: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the last requested row was the last selected row."""
        return self._number >= self._limit

    def forget(self) -> None:
        """Forget rows that have been read; the last requested row may not have been read yet."""
        self.numbers = {place: number for place, number in self.numbers.items() if place == self._given}

    def next_wanted(self, place: int) -> int:
        """The first position >= `place` that is selected and not done; `sys.maxsize` if there is none."""
        while self._number < self._limit:
            wanted = self._next_todo(self._number)
            if self._place >= place and wanted == self._number:
                self.numbers[self._place] = self._number
                self._given = self._place
                return self._place
            self._advance(wanted, place)
        return _END

    def _advance(self, wanted: int, place: int) -> None:
        """Advance by one row, or directly to the next wanted row of a shard."""
        if self._sampled is not None:
            self._number += 1
            self._place = next(self._sampled)
            return
        index, count = self._shard
        self._number = max(self._number + (wanted == self._number), wanted, -((index - place) // count))
        self._place = index + self._number * count


def _places(selection: Selection, sample: float) -> Iterator[int]:
    """The positions of a random sample, ascending and infinite."""
    index, count = selection.shard or (0, 1)
    number = 0
    while True:
        lots = random.Random(f"{selection.sample_seed} {number // _RUN}")
        for lot in range(number, number + _RUN):
            if lots.random() < sample:
                yield index + lot * count
        number += _RUN


def _renumber(record: Record, number: int) -> Record:
    return Record(number, record.id, record.data)
