"""The server process: accepts requests until it is stopped, then drains."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from headrace.concurrency.garbage_collection import fewer_collections
from headrace.concurrency.short_turns import short_turns
from headrace.errors import ConfigError
from headrace.serving.http.bounded_protocol import protocol_options
from headrace.serving.http.key_file import KeyFile
from headrace.serving.http.listening import bind
from headrace.serving.state import ServerState

if TYPE_CHECKING:
    from headrace.serving.http.over_grpc import GrpcAddress, GrpcServer

_CLOSE_TIMEOUT_S = 2
"""Seconds for connections to receive their answers at the end."""
_UNLISTED = frozenset({"/openapi.json", "/docs/oauth2-redirect", "/redoc"})
"""Routes that the startup message omits."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"headrace: {line}\n")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: after SIGTERM or Ctrl-C, `/ready` and new requests get 503.

    It exits when all accepted requests are answered, or after `drain_s` seconds; unfinished requests then get 503. A
    second signal exits at once.

    Args:
        uvicorn_options: options of `uvicorn.Config`, such as host, port and TLS.
        key_file: where the API keys of `state` are from; None for no file.
        grpc: where to serve the app over gRPC too; None for HTTP alone.
    """

    def __init__(
        self,
        app: FastAPI,
        state: ServerState,
        uvicorn_options: Mapping[str, Any],
        key_file: KeyFile | None = None,
        grpc: GrpcAddress | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                lifespan="off",  # run_app enters it, so that a load failure is reported in one line
                **protocol_options(state.limits),
                **uvicorn_options,
            )
        )
        self._app = app
        self._state = state
        self._key_file = key_file
        self._grpc: GrpcServer | None = None
        if grpc is not None:
            from headrace.serving.http.over_grpc import GrpcServer

            self._grpc = GrpcServer(app, grpc, state.limits.max_body_bytes)
        self._drain_until = 0.0
        self._on_ready: Callable[[str, Sequence[str]], None] | None = None
        self._say: Callable[[str], None] = _to_stderr
        self._signalled = False
        state.on_dead = self._drain

    def run_app(
        self, on_ready: Callable[[str, Sequence[str]], None] | None = None, say: Callable[[str], None] = _to_stderr
    ) -> int:
        """Load the model and serve until stopped. Blocks.

        Args:
            on_ready: called with the address and the routes once the server accepts requests.
            say: tells people that a signal came.

        Returns:
            The exit status: 0 after a drain, 1 if the engine died, so that a supervisor restarts the server.

        Raises:
            HeadraceError: the model cannot be loaded, or the address or a TLS file cannot be used.
        """
        self._on_ready, self._say = on_ready, say
        try:
            self.config.load()
        except OSError as error:  # includes ssl.SSLError; neither names the file
            given = (self.config.ssl_certfile, self.config.ssl_keyfile, self.config.ssl_ca_certs)
            files = ", ".join(str(file) for file in given if file)
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot use TLS files {files}: {reason}; check that they are PEM files, that they match and that the "
                "password is right"
            ) from error
        factory = self.config.get_loop_factory()
        # Bound before the model is loaded, without listening yet.
        with (
            short_turns(),
            bind(self.config.host, self.config.port) as listener,
            asyncio.Runner(loop_factory=factory) as runner,
        ):
            runner.run(self._run(listener))
        return 1 if self._state.dead else 0

    async def _run(self, listener: socket.socket) -> None:
        keys = nullcontext() if self._key_file is None else self._key_file.followed(self._state.keys)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            # The terminal has closed. With a file of keys, it is read again instead.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)
        async with keys, self._app.router.lifespan_context(self._app):
            gc.collect()
            with fewer_collections():  # they would delay requests
                await self.serve(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen and call `on_ready`. Raises ConfigError: gRPC cannot be served."""
        also = [] if self._grpc is None else [await self._grpc.start()]
        await super().startup(sockets)
        if self._on_ready is not None and self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            address = f"{'https' if self.config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
            paths = dict.fromkeys(getattr(route, "path", "") for route in self._app.routes)
            listed = [path for path in paths if path and "{" not in path and path not in _UNLISTED]
            self._on_ready(address, listed + also)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close both servers. Accepted requests are answered by then, and calls of gRPC with them."""
        if self._grpc is not None:
            await self._grpc.stop(_CLOSE_TIMEOUT_S)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a signal handler
        """Drain; exit at once on the second signal. Batches continue after a restart."""
        if self._drain_until:
            os._exit(128 + sig)
        self._signalled = True  # told by `on_tick`: here it may have interrupted what writes a message
        self._drain()

    def _drain(self) -> None:
        self._state.draining = True
        self._drain_until = time.monotonic() + self._state.limits.drain_s

    async def on_tick(self, counter: int) -> bool:
        """Whether to exit now. Called ten times per second."""
        if self._signalled:
            self._signalled = False
            self._say("stopping: finishing accepted requests (press Ctrl-C again to stop at once)")
        if await super().on_tick(counter):
            return True
        if not self._drain_until:
            return False
        left_s = self._drain_until - time.monotonic()
        if not self._state.in_progress:
            # Slow clients may still be reading their answers.
            self.config.timeout_graceful_shutdown = max(_CLOSE_TIMEOUT_S, math.ceil(left_s))
            return True
        if left_s > 0:
            return False
        await self._state.abandon()
        return True
