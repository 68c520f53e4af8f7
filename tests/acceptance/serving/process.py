"""A server as its users run it: a process of its own."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
from tests.acceptance.command import start, traced
from tests.waiting import until


@contextlib.contextmanager
def port_of_ours() -> Iterator[int]:
    """A port on which a server can listen, and which nobody else on this machine is given as long as the block lasts.

    A socket is bound to it and does not listen: the system hands out the port neither to another test's server nor to
    a client's connection, which could even be connected to itself.
    """
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield int(place.getsockname()[1])


@contextlib.contextmanager
def server(*arguments: str, folder: Path, file_bytes: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headrace serve` with these arguments, ready; its process and its address. See `start` for `file_bytes`."""
    with port_of_ours() as port:
        url = f"http://127.0.0.1:{port}"
        with traced(start("serve", "--port", str(port), *arguments, folder=folder, file_bytes=file_bytes)) as process:
            wait_until_ready(process, url)
            yield process, url


def wait_until_ready(process: subprocess.Popen[str], url: str, verify: ssl.SSLContext | bool = True) -> None:
    """Wait for the server, as long as its process lives."""

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", verify=verify, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    until(ready, math.inf, of=process)
