"""One writer per output in an object store, which knows no locks: a lease, kept by writing it again and again.

The holder made the lease object by a put that fails where one is there, and replaces it every 10 seconds. Who finds one
watches it by its own monotonic clock: a new content means that the holder lives; none for 40 seconds means that it does
not, and the lease is taken over by a put that fails where the content has changed meanwhile. Clocks of two machines are
never compared. The lease of a process that is gone from this machine is taken over at once.

A holder that finds another's lease in place of its own has been taken for dead, and must stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, JobError, OutputLockedError
from headrace.io.storage.locations import as_os_errors, facts, store, with_retries

RENEW_S = 10.0
EXPIRE_S = 40.0
ALONE_S = 5.0
"""What a process that is gone had sent by then has come to the store."""


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int
    started: str
    """When the process began, in the kernel's own count: a number may be given to another process later."""
    host: str
    since: str
    token: str
    beat: int = 0
    space: str = ""
    """Where the number is that of a process: containers may share a host's name, and have numbers of their own."""

    def is_gone(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return self.space == _space() != "" and self.host == _host() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Held while the context lasts; `check` says whether it still is.

    Args:
        path: the address of the lease object.
        output: what it guards, for messages.
        sleep, clock: how to wait, and by which clock.
    """

    def __init__(
        self,
        path: Path,
        output: Path,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._fs, self._address = store(path)
        self._output = output
        self._sleep = sleep
        self._clock = clock
        self._me = _Holder(os.getpid(), _started(os.getpid()), _host(), _now(), secrets.token_hex(8), space=_space())
        self._sent = self._renewed = 0.0
        self._followed: float | None = None
        self._ended = threading.Event()
        self._lost = ""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it while the body runs.

        Raises:
            OutputLockedError: another process holds it; the message names it.
            ConfigError: the store does not let this process write there.
        """
        try:
            self._take()
        except OSError as error:
            raise ConfigError(f"cannot write {self._output}: {error.strerror or error}") from error
        keeper = threading.Thread(target=self._keep, name="headrace-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            self._ended.set()
            keeper.join()
            if not self._lost:
                with contextlib.suppress(OSError):  # it expires by itself
                    self._fs.rm_file(self._address)

    def check(self) -> None:
        """See that the lease is still held; called before each write.

        Raises:
            JobError: another process has taken it over, or it could not be renewed in time.
        """
        if not self._lost and self._clock() - self._renewed > EXPIRE_S - RENEW_S:
            self._lost = "could not be renewed in time"
        if self._lost:
            raise JobError(
                f"the lease on {self._output} {self._lost}: another process may write there now; what is committed is "
                "kept, run again to continue"
            )

    def wait_until_alone(self) -> None:
        """Wait until nothing can come any more that a process had sent which this one has followed at once."""
        if self._followed is not None:
            self._sleep(max(0.0, self._followed + ALONE_S - self._clock()))

    def _take(self) -> None:
        holder, tag = self._watch()  # first, for there are stores that overwrite whatever is asked
        while holder is None:
            try:
                self._put(mode="create")
                return
            except FileExistsError:
                holder, tag = self._watch()
        if holder.token != self._me.token:  # else the put had come through, and only its answer was lost
            with contextlib.suppress(OSError):
                self._put(**self._unchanged(tag))
            if not self._conditional:
                self._sleep(RENEW_S / 2)  # for who does the same at this moment: the last to write has it
            holder, _ = self._read()
            if holder is None or holder.token != self._me.token:
                raise OutputLockedError(f"{self._output} was taken by {holder} this moment; wait for it")
            self._followed = self._clock()
        self._renewed = self._sent  # the answer to that put may have been lost

    def _watch(self) -> tuple[_Holder | None, str]:
        """Who holds the lease and is most likely dead, with the tag of its last content; None if it was given up.

        Raises:
            OutputLockedError: the holder lives.
        """
        holder, tag = self._read()
        began = self._clock()
        while holder is not None and holder.token != self._me.token and not holder.is_gone():
            if self._clock() - began >= EXPIRE_S:
                break
            self._sleep(RENEW_S / 2)
            seen, tag = self._read()
            if seen is not None and seen != holder:
                raise OutputLockedError(
                    f"{self._output} is being written by {seen}; wait for it, or choose another output"
                )
            holder = seen
        return holder, tag

    def _keep(self) -> None:
        """Renew until the end; runs on a thread of its own."""
        while not self._ended.wait(RENEW_S):
            try:
                holder, tag = self._read()
                if holder is None or holder.token != self._me.token:
                    self._lost = f"was taken over by {holder}" if holder else "was removed"
                    return
                self._me = _Holder(**{**asdict(self._me), "beat": self._me.beat + 1})
                self._put(**self._unchanged(tag))
            except OSError:
                continue  # `check` ends the job when this has lasted too long

    @property
    def _conditional(self) -> bool:
        """Whether the store takes a put only where the content is still the same."""
        return "s3" in self._fs.protocol

    def _unchanged(self, tag: str) -> dict[str, str]:
        return {"IfMatch": tag} if self._conditional else {}

    def _put(self, **conditions: Any) -> None:
        content = json.dumps(asdict(self._me)).encode()
        self._sent = self._clock()
        as_os_errors(self._fs.pipe_file)(self._address, content, **conditions)
        self._renewed = self._clock()

    def _read(self) -> tuple[_Holder | None, str]:
        """Who holds it, and the tag of that content."""
        try:
            tag = facts(self._path).get("ETag", "")
            return _Holder(**json.loads(with_retries(lambda: self._fs.cat_file(self._address))())), tag
        except FileNotFoundError:
            return None, ""


def _host() -> str:
    return socket.gethostname()


def _started(pid: int) -> str:
    """When a process of this machine began; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _space() -> str:
    """What tells apart the process numbers of this boot and this container; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
