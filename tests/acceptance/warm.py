"""Processes forked from one that has imported the libraries: a start takes hundredths of a second.

A command that loads a model spends six seconds of processor time on imports, and most tests of the command line are
about what comes after. A forked process is otherwise as any other: it has an id, a folder, an environment and streams
of its own, takes signals and ends as Python ends. Its parent has one thread, has opened nothing and is nobody's child.
Where a test's environment says something else to a library than the parents' so far, it gets a parent of its own. What
PYTHONPATH has beside the parent's comes last in `sys.path`, and is looked through for plugins too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

IMPORTED: dict[str, tuple[str, ...]] = {
    "light": (
        "headrace.cli.run",
        "headrace.cli.inspect",
        "headrace.serving.http.server",
        "headrace.serving.app",
        "headrace.testing",
        "numpy",
        "pandas",  # which pyarrow imports to look for its types
        "pyarrow.parquet",
        "pyarrow.pandas_compat",
    ),
    "torch": ("torch", "torch._dynamo", "torch.distributed.tensor", "sklearn.metrics", "boto3"),
    "models": ("transformers", "sentence_transformers"),
}
"""What a parent has imported, by its name, beside what the one before it has: it is forked from that one."""
READ_ONCE: dict[str, tuple[str, ...]] = {
    "light": ("PYTHON", "LD_", "LANG", "LC_", "OMP_", "ARROW_"),
    "torch": ("TORCH_", "ATEN_", "MKL_", "CUDA_"),
    "models": ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_"),
}
"""The beginnings of the variables that these libraries read when they are imported. oneDNN reads its own later."""

BEFORE = dict(os.environ)
ROOT = Path(__file__).resolve().parents[2]
SOURCES = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
"""How PYTHONPATH begins where a process may be forked."""


class Child(NamedTuple):
    """What a forked process is to do."""

    arguments: list[str]
    code: str
    folder: str
    environment: dict[str, str]


class Forked(subprocess.Popen[str]):
    """A process that another one has forked: that one says how it ended."""

    def __init__(self, parent: Parent, child: Child) -> None:
        self._parent, self._child = parent, child
        self._ended: socket.socket | None = None
        self._status = 0
        super().__init__(child.arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, *given: Any) -> None:
        """Called once the pipes are made."""
        output, errors = given[13], given[15]
        self.pid, self._ended = self._parent.fork(self._child, (0, output, errors))
        self._child_created = True
        self._close_pipe_fds(given[10], given[11], given[12], output, given[14], errors)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._ended is not None:
            if not select.select([self._ended], [], [], 0 if flags else None)[0]:
                return 0, 0
            with self._ended as ended:
                self._status = int(ended.recv(20) or signal.SIGKILL)  # nothing is said if the parent was killed
            self._ended = None
        return self.pid, self._status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Parent:
    """One that has imported what its name says. It ends with this process."""

    def __init__(self, name: str, read: frozenset[tuple[str, str]]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.acceptance.warm import serve; exec(serve({name!r}))"
        variables = {one: value for one, value in BEFORE.items() if not one.startswith(_prefixes(list(IMPORTED)[-1]))}
        variables |= {**dict(read), "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's one thread
        before = _kinds(name)[1:]
        with theirs:
            if before:
                child = Child([], code, "/", variables)
                parent(before[0], _read(before[0], dict(read))).fork(child, (theirs.fileno(), 1, 2))[1].close()
            else:
                subprocess.run([sys.executable, "-c", code], stdin=theirs.fileno(), env=variables, check=True)
        self.threads = int(self._channel.recv(20))
        atexit.register(self._channel.close)

    def fork(self, child: Child, streams: tuple[int, ...]) -> tuple[int, socket.socket]:
        """The id of a new process, and where its wait status is said."""
        ended, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._channel, [json.dumps(child).encode()], [*streams, theirs.fileno()])
            return int(self._channel.recv(20)), ended


parent = functools.cache(Parent)
"""The one with these libraries, which have read these variables."""


def fork(name: str, child: Child) -> Forked | None:
    """A new process, or None if it must be a real one."""
    path = child.environment["PYTHONPATH"] + os.pathsep
    if not hasattr(os, "pidfd_open") or not path.startswith(SOURCES + os.pathsep):  # not on Linux, or other sources
        return None
    environment = child.environment | {"PYTHONPATH": SOURCES}
    alike = _read("light", BEFORE | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": SOURCES})
    if _read("light", environment) != alike:
        return None
    for kind in _kinds(name):
        found = parent(kind, _read(kind, environment))
        if found.threads == 1:
            return Forked(found, child)
    return None


def _kinds(name: str) -> list[str]:
    """This one, and those that it is forked from."""
    names = list(IMPORTED)
    return names[names.index(name) :: -1]


def _prefixes(kind: str) -> tuple[str, ...]:
    return tuple(prefix for earlier in _kinds(kind) for prefix in READ_ONCE[earlier])


def _read(kind: str, environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """What the libraries of this kind read from it; PYTHONBREAKPOINT is read when it is needed, and Ray sets it."""
    found = environment.items()
    return frozenset(one for one in found if one[0].startswith(_prefixes(kind)) and one[0] != "PYTHONBREAKPOINT")


def serve(name: str) -> str:
    """Fork as often as standard input asks for. Returns only in a forked process: the code that it is to execute."""
    if os.fork():
        os._exit(0)  # so that this is nobody's child
    for module in IMPORTED[name]:
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    fd = os.dup(0)
    channel = socket.socket(fileno=fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel.send(b"%d" % len(list(Path("/proc/self/task").iterdir())))  # with more than one, a fork may hang
    running: dict[int, tuple[int, int]] = {}
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready != fd:
                poller.unregister(ready)
                pid, status_fd = running.pop(ready)
                status = os.waitpid(pid, 0)[1]
                with contextlib.suppress(OSError):  # nobody waits
                    os.write(status_fd, b"%d" % status)
                os.close(status_fd)
                os.close(ready)
                continue
            message, fds, *_ = socket.recv_fds(channel, 1 << 20, 4)
            if not message:
                os._exit(0)
            if not (pid := os.fork()):
                channel.close()
                for opened in (*running, *(status_fd for _, status_fd in running.values()), fds.pop()):
                    os.close(opened)
                return _begin(Child(*json.loads(message)), fds)
            channel.send(b"%d" % pid)
            ended = os.pidfd_open(pid)
            running[ended] = pid, fds.pop()
            poller.register(ended, select.POLLIN)
            for stream in fds:
                os.close(stream)


def _begin(child: Child, streams: list[int]) -> str:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # As Python begins: what the parent's were connected to may have been of another kind.
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(child.environment)
    os.chdir(child.folder)
    sys.argv[:] = child.arguments
    if more := child.environment["PYTHONPATH"].removeprefix(SOURCES).split(os.pathsep)[1:]:
        sys.path += filter(None, more)
        importlib.import_module("headrace.plugins").forget()
    importlib.invalidate_caches()
    if "triton" in sys.modules:  # it complains of objects that are left at the end
        atexit.register(gc.unfreeze)
    return child.code


def _stream(number: int, like: Any) -> io.TextIOWrapper:
    raw = io.FileIO(number, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if like.write_through else io.BufferedWriter(raw),
        like.encoding,
        like.errors,
        "\n",
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
