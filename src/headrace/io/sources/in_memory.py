"""Records from Python: sequences, iterables, async iterables, and functions that return one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sequence

from headrace.batching.results import own
from headrace.errors import ConfigError, HeadraceError, JobError, attempted, text_of
from headrace.io.base import Chunk, class_names
from headrace.io.formats.strict_json import dump_any, safe_text
from headrace.io.storage.rows import CHUNK_ROWS, todo
from headrace.records import Failed, Record, Unreadable

ARRAY = "array"
"""The column of rows that are arrays or lists of numbers."""
HEAD_ROWS = 64
_DIGESTED_ROWS = 1024


class SequenceSource:
    """A list, tuple or other sequence of rows. A row is a dict, or text or None, which stands for {"text": row}, or an
    array or list of numbers, for {"array": row}.

    It is identified by its length and up to 1,024 rows spread over it.
    """

    def __init__(self, rows: Sequence[object]) -> None:
        self._rows = rows
        self.total_bytes: int | None = None
        self.total_records: int | None = len(rows)

    def describe(self) -> Mapping[str, object]:
        total = len(self._rows)
        count = min(total, _DIGESTED_ROWS)
        places = (number * (total - 1) // max(1, count - 1) for number in range(count))
        return {"format": "sequence", "records": total, "blake2b": digest_of(self._rows[place] for place in places)}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        rows = self._rows
        for start in range(0, len(rows), CHUNK_ROWS):
            positions = todo(start, min(start + CHUNK_ROWS, len(rows)), next_todo)
            if type(rows) in (list, tuple):
                yield chunk_of((position, rows[position]) for position in positions)
            else:  # a dataset may fill the same object again
                yield chunk_of((position, own(rows[position])) for position in positions)


class IterableSource:
    """An iterable, an asynchronous iterable, or a function that returns either.

    To resume a job, pass the same rows again: finished rows are skipped by position, and the first 64 rows must be the
    same as before. An iterator can be read only once, which is enough for a run; reading twice (a dry run) needs a
    re-iterable object, or a function that returns one. An async iterable is read on a private event loop.
    """

    def __init__(self, rows: object) -> None:
        self._make: Callable[[], object] = rows if callable(rows) else lambda: rows
        self.reads_once = not callable(rows) and (hasattr(rows, "__next__") or hasattr(rows, "__anext__"))
        self._reading = self._iterate()
        self._head = self._first()
        self._taken = False
        self.total_bytes: int | None = None
        self.total_records: int | None = None

    def describe(self) -> Mapping[str, object]:
        """Digest of the first rows."""
        return {"format": "iterable", "first_records": len(self._head), "blake2b": digest_of(self._head)}

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 64 rows."""
        for start, rows in self._batches():
            positions = todo(start, start + len(rows), next_todo)
            yield chunk_of([(position, rows[position - start]) for position in positions])

    def _batches(self) -> Iterator[tuple[int, list[object]]]:
        """Lists of rows with the position of their first row, beginning with the rows read ahead."""
        yield 0, self._head
        if len(self._head) < HEAD_ROWS:
            return  # these were all
        if self._read_anew():
            self._first()
        start = len(self._head)
        while batch := list(itertools.islice(self._reading, HEAD_ROWS)):
            yield start, batch
            start += len(batch)

    def _first(self) -> list[object]:
        """The first rows of a reading."""
        return list(itertools.islice(self._reading, HEAD_ROWS))

    def _read_anew(self) -> bool:
        """Whether the reading has to begin again, which it then has, or else follows the rows read ahead.

        Raises:
            JobError: it cannot be read again.
        """
        again, self._taken = self._taken, True
        if again and self.reads_once:
            raise JobError(
                "the input is an iterator, which is read only once; give a list, or a function that returns a new one"
            )
        if again:
            self.close()
            self._reading = self._iterate()
        return again

    def close(self) -> None:
        """End the reading that has begun, which may hold a file or a database's result open.

        The source can be read again from its beginning, unless it reads once.
        """
        self._taken = True
        with contextlib.suppress(ValueError):  # a thread still waits for its next row, and drops it then
            self._reading.close()

    def _iterate(self) -> Generator[object]:
        try:
            rows = self._make()
            if not isinstance(rows, (Iterable, AsyncIterable)):
                raise ConfigError(
                    f"the input is of type {type(rows).__name__}; give a file name, an iterable or a function that "
                    "returns one"
                )
            # It may yield the same object again with other content.
            yield from map(own, _run(rows) if isinstance(rows, AsyncIterable) else rows)
        except (GeneratorExit, HeadraceError):
            raise  # the reader has stopped, or the input is refused
        except BaseException as error:
            # User code may raise anything; it ends the job, not a record.
            raise JobError(
                f"the input raised {type(error).__name__}: {text_of(error)}; finished records are kept"
            ) from error


def _run(rows: AsyncIterable[object]) -> Iterator[object]:
    """Iterate over an async iterable synchronously."""
    end = object()
    runner = asyncio.Runner()
    try:
        iterator = aiter(rows)

        async def following() -> object:
            return await anext(iterator, end)

        while (row := runner.run(following())) is not end:
            yield row
    finally:  # on a thread, because an unfinished generator may be dropped within a running loop
        closing = threading.Thread(target=runner.close, name="headrace-close-input")
        closing.start()
        closing.join()


def chunk_of(rows: Iterable[tuple[int, object]]) -> Chunk:
    """Convert (position, row) pairs to records; an invalid row becomes a `Failed`."""
    return Chunk.of(itertools.starmap(record_of, rows), 0)


def record_of(position: int, row: object) -> Record | Failed:
    """The record of a row; a `Failed` if it is none."""
    data = {"text": str(row)} if isinstance(row, str) else {ARRAY: row} if _is_array(row) else row
    if row is None:
        data = {"text": None}
    if type(row) is Unreadable:
        return Failed(Record(position, position, str(row)), "RecordError", row.reason)
    if isinstance(data, Mapping):
        return Record(position, position, data)
    message = f"the row is of type {type(row).__name__}, neither a dict nor a text: {_way_out(row)}"
    return Failed(Record(position, position, safe_text(row)[:200]), "TypeError", message)


def _is_array(row: object) -> bool:
    """Whether a row is an array, a tensor or a number of theirs, or a list of numbers, or of such lists."""
    if type(row) is list:
        return bool(row) and (type(row[0]) in (int, float) or _is_array(row[0]))
    return hasattr(row, "__array__") and hasattr(row, "ndim") and hasattr(row, "dtype")


def _way_out(row: object) -> str:
    """How to give such rows."""
    if "PIL.Image" in class_names(row):
        return 'give {"image": a path or the bytes of a file}, with an image task'
    value = "row[0]" if isinstance(row, tuple) else "row"
    return f'give dicts, as in [{{"text": {value}}} for row in rows]'


def digest_of(rows: Iterable[object]) -> str:
    """Digest of the rows' content, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        try:
            text = json.dumps(row, sort_keys=True, default=_stable)
        except (TypeError, ValueError, RecursionError):  # for example keys that are not text; not an error here
            text = dump_any(row, _stable)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def _stable(value: object) -> str:
    """Text that is the same in every process, unlike an object's default text with its address."""
    if isinstance(value, (bytes, bytearray)):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    text = attempted(lambda: str(value.tolist()) if hasattr(value, "tolist") else type(value).__name__)
    if isinstance(text, KeyboardInterrupt):
        raise text
    return type(value).__name__ if isinstance(text, BaseException) else text
