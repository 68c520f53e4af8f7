"""`headrace run --port`: the dashboard of a job, on this machine alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from headrace.serving.app import add_error_handlers
from headrace.serving.http.listening import bind
from headrace.serving.live import Observed
from headrace.serving.routes.dashboard import router

HOST = "127.0.0.1"
_TIMEOUT_S = 10.0
_END_S = 5.0


@contextlib.contextmanager
def serve_dashboard(observed: Observed, port: int) -> Iterator[str]:
    """Serve the dashboard while the body runs; yields its address.

    Only this machine can reach it, and no page of another server: names other than this machine's are refused.

    Raises:
        ConfigError: the port cannot be used.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.extend(router(observed, lambda _: None, lambda: True, _TIMEOUT_S).routes)
    add_error_handlers(app)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    options = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **options))  # type: ignore[arg-type]
    with bind(HOST, port) as listener:
        listener.listen()  # the address is shown before the server's thread runs
        thread = threading.Thread(target=server.run, args=([listener],), name="headrace-dashboard", daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{listener.getsockname()[1]}/dashboard"
        finally:
            server.should_exit = True
            thread.join(_END_S)
