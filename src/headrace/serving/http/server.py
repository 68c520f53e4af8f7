"""The process that serves an app: takes requests until it is told to stop, then finishes what it has accepted."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from headrace.errors import ConfigError
from headrace.serving.http.bounded_protocol import protocol_options
from headrace.serving.state import ServerState

_LAST_WORDS_S = 2
"""How long connections may take to receive their answers at the very end, in seconds."""
_UNSAID = frozenset({"/openapi.json", "/docs/oauth2-redirect", "/redoc"})
"""Routes that the line at the start passes over."""
_SWITCH_S = 0.0005
"""How long the event loop may keep Python from the engine's thread, a tenth of what is usual: a batch that waits for it
leaves the engine without work."""


class Server(uvicorn.Server):
    """A uvicorn server that drains: SIGTERM or Ctrl-C turns `/ready` off and new requests away with 503.

    It ends when what was accepted is answered, or after `drain_s`: what is left then gets 503 too. A second signal
    ends the process at once.

    Args:
        app: served.
        host: its state.
        uvicorn_options: host, port, TLS and so on, as `uvicorn.Config` takes them.
    """

    def __init__(self, app: FastAPI, host: ServerState, uvicorn_options: Mapping[str, Any]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS_S,
                lifespan="off",  # it is entered here, so that a model that cannot be loaded is told in one line
                **protocol_options(host.limits),
                **uvicorn_options,
            )
        )
        self._app = app
        self._host = host
        self._drain_until = 0.0
        self._on_ready: Callable[[str, Sequence[str]], None] | None = None
        host.on_dead = self._drain

    def run_app(self, on_ready: Callable[[str, Sequence[str]], None] | None = None) -> int:
        """Load the model and serve until told to stop. Blocks.

        Args:
            on_ready: told the address and the routes once requests are taken.

        Returns:
            The exit status: 0 after a drain, 1 if the engine died, so that a supervisor starts another server.

        Raises:
            HeadraceError: the model cannot be loaded, or the address or a TLS file cannot be used.
        """
        self._on_ready = on_ready
        try:
            self.config.load()
        except OSError as error:  # as ssl's are too; they do not say which file
            given = (self.config.ssl_certfile, self.config.ssl_keyfile, self.config.ssl_ca_certs)
            files = ", ".join(str(file) for file in given if file)
            reason = error.strerror or str(error)
            raise ConfigError(
                f"TLS does not work with {files}: {reason}; see that they are PEM, belong together and need no other "
                "password"
            ) from error
        sys.setswitchinterval(_SWITCH_S)
        with self._bound() as place, asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self._live(place))
        return 1 if self._host.dead else 0

    def _bound(self) -> socket.socket:
        """The address, taken before a model is loaded; nobody is listened to yet.

        Raises:
            ConfigError: it cannot be had.
        """
        host, port = self.config.host, self.config.port
        place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host, port))
        except OSError as error:
            place.close()
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
        return place

    async def _live(self, place: socket.socket) -> None:
        async with self._app.router.lifespan_context(self._app):
            # What is there now stays: looking through it for garbage would hold up all requests, now and then.
            gc.collect()
            gc.freeze()
            try:
                await self.serve(sockets=[place])
            finally:
                gc.unfreeze()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        if self._on_ready is not None and self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            address = f"{'https' if self.config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
            paths = dict.fromkeys(getattr(route, "path", "") for route in self._app.routes)
            self._on_ready(address, [path for path in paths if path and "{" not in path and path not in _UNSAID])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's shape
        """Drain; at the second signal end at once, which is safe at any moment: batch jobs are continued."""
        if self._drain_until:
            os._exit(128 + sig)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"headrace: stopping: finishing what is accepted (again to end at once)\n")
        self._drain()

    def _drain(self) -> None:
        self._host.draining = True
        self._drain_until = time.monotonic() + self._host.limits.drain_s

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end now."""
        if await super().on_tick(counter):
            return True
        if not self._drain_until:
            return False
        service = self._host.loaded
        left_s = self._drain_until - time.monotonic()
        if service is None or not self._host.under_way:
            # What is answered may still be on its way to clients that read slowly.
            self.config.timeout_graceful_shutdown = max(_LAST_WORDS_S, math.ceil(left_s))
            return True
        if left_s > 0:
            return False
        await service.batcher.stop(timeout=0.1, drain=False)  # each of them is told 503
        return True
