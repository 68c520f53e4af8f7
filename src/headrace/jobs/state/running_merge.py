"""The merge of a job's parts into its output file, which begins while the job still runs.

A file of vectors takes half as long to merge as a fast device takes for the job, and the device would wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from headrace.errors import tried
from headrace.io.storage.checksums import Interval

BEGIN_BYTES = 16 * 1024 * 1024
"""Bytes of the parts before their merge begins: less is merged in no time at the end."""


class _GivenUpError(Exception):
    """The job ends without its output file."""


class RunningMerge:
    """Merges parts in input order, each as soon as it and all before it are committed.

    It only saves time: if it fails or is stopped, the job merges all parts at its end, and says what is wrong there.

    Args:
        merge: writes the output file from parts in input order, of which the next may not be there yet, and returns its
            digest.
    """

    def __init__(self, merge: Callable[[Iterable[Interval]], str]) -> None:
        self._merge = merge
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Interval | None] = SimpleQueue()
        self._later: dict[int, Interval] = {}
        """Committed parts, by their first position, that others must precede."""
        self._given: list[Interval] = []
        self._bytes = 0
        self._is_stopped = False
        self._digest: str | Exception | None = None

    def add(self, parts: Iterable[Interval], size: int = 0) -> None:
        """Take committed parts, which have `size` bytes together."""
        self._bytes += size
        self._later.update((part.start, part) for part in parts)
        if self._bytes >= BEGIN_BYTES and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-merge", daemon=True)
            self._thread.start()
        while self._thread is not None and (part := self._later.pop(self._end, None)) is not None:
            self._give(part)

    def finish(self, parts: Sequence[Interval]) -> str | None:
        """The digest of the file with these parts, which are all; None if they are to be merged now."""
        if self._thread is None or self._given != parts[: len(self._given)]:
            self.stop()
            return None
        for part in parts[len(self._given) :]:
            self._give(part)
        self._queue.put(None)
        self._thread.join()
        return self._digest if isinstance(self._digest, str) else None

    def stop(self) -> None:
        """End it, without a file if it is not complete. May be called again."""
        if self._thread is not None:
            self._is_stopped = True
            self._queue.put(None)
            self._thread.join()

    @property
    def _end(self) -> int:
        return self._given[-1].end if self._given else 0

    def _give(self, part: Interval) -> None:
        self._given.append(part)
        self._queue.put(part)

    def _run(self) -> None:
        self._digest = tried(lambda: self._merge(self._parts()))

    def _parts(self) -> Iterator[Interval]:
        while (part := self._queue.get()) is not None and not self._is_stopped:
            yield part
        if self._is_stopped:
            raise _GivenUpError
