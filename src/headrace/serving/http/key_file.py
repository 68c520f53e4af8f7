"""Reads the API keys again while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError
from headrace.serving.auth import Keys, read_keys

_POLL_S = 1.0


class KeyFile:
    """A file of API keys. One that cannot be used changes nothing, and is told.

    Args:
        environment: further keys, as for `read_keys`.
        say: tells the operator what became of the file.
    """

    def __init__(
        self, path: Path, environment: str | None, say: Callable[[str, Literal["info", "error"]], None]
    ) -> None:
        self._path = path
        self._environment = environment
        self._say = say
        self._asked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def followed(self, keys: Keys) -> AsyncIterator[None]:
        """Give `keys` what the file holds whenever it has changed, or on SIGHUP, while the body runs."""
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._asked.set)
        following = asyncio.create_task(self._follow(keys), name="headrace-keys")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, keys: Keys) -> None:
        before: object = None
        done: object = self  # so that a change since it was read at the start is found
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            now = await asyncio.to_thread(self._version)
            if asked or now == before != done:  # a file that changes still may be half written
                done = now
                await self._read(keys, asked=asked)
            before = now

    def _version(self) -> object:
        try:
            found = self._path.stat()
        except OSError as error:
            return error.errno
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    async def _read(self, keys: Keys, *, asked: bool) -> None:
        try:
            found = await asyncio.to_thread(read_keys, self._path, self._environment)
        except ConfigError as error:
            self._say(f"{error}; the keys that were read before stay valid", "error")
            return
        if keys.replace(found) or asked:
            self._say(f"read {len(found)} API keys from {self._path}", "info")
