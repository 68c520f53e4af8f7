"""A server as its users run it: a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from tests.acceptance.command import start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(*arguments: str, folder: Path, file_bytes: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headrace serve` with these arguments, ready; its process and its address. See `start` for `file_bytes`."""
    port = free_port()
    process = start("serve", "--port", str(port), *arguments, folder=folder, file_bytes=file_bytes)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield process, url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


def wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + 40
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"no server: {process.communicate()[1] if process.poll() is not None else 'not ready'}")
