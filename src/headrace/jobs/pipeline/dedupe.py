"""Computes equal inputs once: keeps outputs on disk by a digest of the input while the job runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import pickle
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.jobs.pipeline.work import Work

logger = logging.getLogger("headrace")

_KEYS_PER_QUERY = 500
_CACHE_KIB = 16 * 1024


def key_of(value: object) -> bytes | None:
    """A 256-bit digest of the input; None for an input that JSON cannot hold."""
    if isinstance(value, str):
        content = b"s" + value.encode(errors="surrogatepass")
    else:
        try:
            content = b"j" + json.dumps(value, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError):
            return None
    return hashlib.blake2b(content, digest_size=32).digest()


class RepeatCounter:
    """Counts how many of the first inputs are equal to an earlier one, to tell whether computing them once is worth it.

    Threads may call it at the same time; the counts may then be off by some.
    """

    most = 20_000

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._looked = 0

    @property
    def ends(self) -> bool:
        return self._looked >= self.most

    def look(self, hashes: Sequence[int], among: int) -> tuple[int, int]:
        """How many texts were compared with earlier ones, and how many are equal to one.

        Args:
            among: how many inputs there were; not all need be texts.
        """
        fresh = set(hashes) - self._seen
        self._looked += among
        if self._looked < self.most:
            self._seen |= fresh
        else:
            self._seen.clear()
        return len(hashes), len(hashes) - len(fresh)


class Deduplicator:
    """Decides which items are computed, which wait for an equal one, and which have a known output.

    Memory holds the items in progress and a cache of 16 MiB. The outputs are in a temporary file without a name, which
    the system removes even after a kill.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-dedupe")
        self._connection: sqlite3.Connection | None = None
        self._in_progress: dict[bytes, list[Work]] = {}
        self._fresh: dict[bytes, object] = {}
        """New outputs, not yet in the file."""
        self._stores = True
        self.waiting = 0
        """Items that wait for an equal one."""

    async def sort_out(self, items: Sequence[Work]) -> tuple[list[Work], list[tuple[Work, object]]]:
        """The items to compute now, and those with a known output. The others wait. One call at a time."""
        fresh, self._fresh = self._fresh, {}
        keys = {item.key for item in items if item.key is not None}
        known = await self._known(fresh, keys)
        to_do: list[Work] = []
        done: list[tuple[Work, object]] = []
        for item in items:
            key = item.key
            if key is None:
                to_do.append(item)
            elif key in known:
                done.append((item, known[key]))
            elif key in self._fresh:
                done.append((item, self._fresh[key]))
            elif key in self._in_progress:
                self._in_progress[key].append(item)
                self.waiting += 1
            else:
                self._in_progress[key] = []
                to_do.append(item)
        return to_do, done

    async def _known(self, fresh: Mapping[bytes, object], keys: Iterable[bytes]) -> dict[bytes, object]:
        """Store new outputs and return those with these keys; without a disk to store them, none from now on."""
        if self._stores:
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self._store_and_find, fresh, keys)
            except sqlite3.Error as error:
                self._stores = False
                logger.warning("headrace: cannot keep outputs for equal inputs, which are computed again: %s", error)
        return {}

    def computed(self, item: Work, output: object) -> list[Work]:
        """Store the output of an item; returns the items that waited for it."""
        if item.key is not None:
            self._fresh[item.key] = output
        return self.given_up(item)

    def given_up(self, item: Work) -> list[Work]:
        """Forget an item that failed; returns the items that waited for it."""
        waiting = [] if item.key is None else self._in_progress.pop(item.key, [])
        self.waiting -= len(waiting)
        return waiting

    def close(self) -> None:
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _store_and_find(self, fresh: Mapping[bytes, object], keys: Iterable[bytes]) -> dict[bytes, object]:
        if self._connection is None:
            self._connection = sqlite3.connect("")  # a private temporary file without a name
            self._connection.execute("PRAGMA journal_mode = OFF")
            self._connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._connection.execute("CREATE TABLE seen (key BLOB PRIMARY KEY, output BLOB) WITHOUT ROWID")
        rows = ((key, pickle.dumps(output)) for key, output in fresh.items())
        self._connection.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?)", rows)
        return {key: pickle.loads(output) for key, output in self._find(sorted(keys))}

    def _find(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        assert self._connection is not None, "connected by the caller"
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            some = keys[start : start + _KEYS_PER_QUERY]
            marks = ",".join("?" * len(some))
            yield from self._connection.execute(f"SELECT key, output FROM seen WHERE key IN ({marks})", some)
