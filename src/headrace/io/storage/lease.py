"""A lease: ensures one writer per output in an object store, which has no locks.

The holder creates the lease object with a put that fails if one exists, and replaces it every 10 seconds. A process
that finds a lease watches it on its own monotonic clock. New content means that the holder is alive; if the content
stays the same for 40 seconds, the process takes the lease over with a put that fails if the content has changed. Clocks
of two machines are never compared. The lease of a dead process on this machine is taken over immediately.

A holder that finds another process's lease has lost its own and must stop.
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

from headrace.errors import ConfigError, JobError, OutputLockedError
from headrace.io.storage.locations import as_os_errors, facts, store, with_retries

RENEW_S = 10.0
EXPIRE_S = 40.0
ALONE_S = 5.0
"""After this time, in seconds, the last writes of a dead process have arrived in the store."""


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int
    started: str
    """Start time of the process in kernel ticks, because process ids are reused."""
    host: str
    since: str
    token: str
    beat: int = 0
    space: str = ""
    """The boot and pid namespace, because containers may share a host name but not process ids."""

    def is_gone(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        return self.space == _space() != "" and self.host == socket.gethostname() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Held during the context; `check` verifies that it still is."""

    def __init__(
        self,
        path: Path,
        output: str | Path,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._fs, self._address = store(path)
        self._output = output
        self._sleep = sleep
        self._clock = clock
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._me = _Holder(
            os.getpid(), _started(os.getpid()), socket.gethostname(), now, secrets.token_hex(8), space=_space()
        )
        self._sent = self._renewed = 0.0
        self._followed: float | None = None
        self._ended = threading.Event()
        self._lost = ""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease during the context.

        Raises:
            OutputLockedError: another process holds it; the message names it.
            ConfigError: this process may not write to the store.
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
        """Check that the lease is still held; called before each write.

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
        """Wait until no more writes of the previous, dead holder can arrive."""
        if self._followed is not None:
            self._sleep(max(0.0, self._followed + ALONE_S - self._clock()))

    def _take(self) -> None:
        holder, tag = self._watch()  # first, because some stores ignore the condition of a put
        while holder is None:
            try:
                self._put(mode="create")
                return
            except FileExistsError:
                holder, tag = self._watch()
        if holder.token != self._me.token:  # otherwise the put succeeded and only its response was lost
            with contextlib.suppress(OSError):
                self._put(**self._unchanged(tag))
            if not self._conditional:
                self._sleep(RENEW_S / 2)  # if another process does the same now, the last writer wins
            holder, _ = self._read()
            if holder is None or holder.token != self._me.token:
                raise OutputLockedError(f"{self._output} has just been taken by {holder}; wait for it")
            self._followed = self._clock()
        self._renewed = self._sent  # the response to that put may have been lost

    def _watch(self) -> tuple[_Holder | None, str]:
        """The holder, probably dead, with the tag of its last content; None if the lease was released.

        Raises:
            OutputLockedError: the holder is alive.
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
        """Renew the lease until the end; runs on a separate thread."""
        while not self._ended.wait(RENEW_S):
            try:
                holder, tag = self._read()
                if holder is None or holder.token != self._me.token:
                    self._lost = f"was taken over by {holder}" if holder else "was removed"
                    return
                self._me = _Holder(**{**asdict(self._me), "beat": self._me.beat + 1})
                self._put(**self._unchanged(tag))
            except OSError:
                continue  # `check` ends the job if this lasts too long

    @property
    def _conditional(self) -> bool:
        return "s3" in self._fs.protocol

    def _unchanged(self, tag: str) -> dict[str, str]:
        return {"IfMatch": tag} if self._conditional else {}

    def _put(self, **conditions: object) -> None:
        content = json.dumps(asdict(self._me)).encode()
        self._sent = self._clock()
        as_os_errors(self._fs.pipe_file)(self._address, content, **conditions)
        self._renewed = self._clock()

    def _read(self) -> tuple[_Holder | None, str]:
        try:
            tag = facts(self._path).get("ETag", "")
            return _Holder(**json.loads(with_retries(lambda: self._fs.cat_file(self._address))())), tag
        except FileNotFoundError:
            return None, ""


def may_live(content: str) -> bool:
    """Whether the holder of a lease with this content may be alive: not a process of this machine that has ended."""
    try:
        return not _Holder(**json.loads(content)).is_gone()
    except (ValueError, TypeError):  # written by another version
        return True


def _started(pid: int) -> str:
    """The start time of a process of this machine; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _space() -> str:
    """Identifies the boot and pid namespace of process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
