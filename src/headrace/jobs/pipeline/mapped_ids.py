"""Checks ids that user code makes for duplicates, when a chunk is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.errors import RecordError
from headrace.io.base import Chunk, Source
from headrace.io.sources.unique_ids import Found, SeenIds, unknown_or_todo
from headrace.jobs.pipeline.columns import Columns
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.pipeline.work import PreparedChunk
from headrace.records import Record


class MappedIds:
    """Reads the input and checks the ids of prepared records. All methods block.

    On a resume, finished records whose ids are in no run file are prepared again, at most about 131,000.

    Args:
        source: the rows.
        columns: name the id column of a mapped row.
        user: maps the rows.
        folder: returns the folder for the run files; called when reading begins.
    """

    def __init__(self, source: Source, columns: Columns, user: UserCode, folder: Callable[[], Path]) -> None:
        self._source = source
        self._columns = columns
        self._user = user
        self._folder = folder
        self._seen: SeenIds | None = None
        self._next_todo: Callable[[int], int] = lambda position: position

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The chunks to prepare, then to pass to `check` in the same order."""
        self._next_todo = next_todo
        self._seen = SeenIds(self._folder(), self._reread, self._columns.id or "")
        yield from self._source.chunks(unknown_or_todo(self._seen, next_todo))

    def check(self, prepared: PreparedChunk) -> list[int]:
        """Check the ids of a chunk and drop its finished records; returns their positions.

        Raises:
            JobError: an id is duplicated.
        """
        assert self._seen is not None, "`chunks` is called first"
        known, rows = self._seen.known, prepared.positions()
        new = [work.record for work in prepared.work if work.record.position >= known]
        self._seen.add([row.position for row in new], [row.id for row in new], rows[-1] + 1 if rows else 0)
        done = [position for position in rows if self._next_todo(position) != position]
        prepared.drop(frozenset(done))
        return done

    def finish(self) -> None:
        """Check the last ids.

        Raises:
            JobError: an id is duplicated.
        """
        if self._seen is not None:
            self._seen.look()

    def _reread(self) -> Iterator[Found]:
        for chunk in self._source.chunks(lambda position: position):
            for _, mapped in self._user.prepared(chunk.records):
                if isinstance(mapped, Record) and (identity := self._identity(mapped)) is not None:
                    yield mapped.position, identity

    def _identity(self, mapped: Record) -> str | int | None:
        try:
            identity: str | int = self._columns.identify(mapped).id
        except RecordError:
            return None
        return identity
