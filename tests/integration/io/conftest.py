"""A real S3 server on loopback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Host and port of the server."""
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def use_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Any]]:
    """Points S3 at a host and port, and gives its file system."""
    s3fs = pytest.importorskip("s3fs")

    def use(host: str, port: int) -> Any:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem(use_listings_cache=False)

    yield use
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(s3_server: tuple[str, int], use_s3: Callable[[str, int], Any]) -> Any:
    """The file system, with an empty bucket named `rows`."""
    store = use_s3(*s3_server)
    if store.exists("rows"):
        store.rm("rows", recursive=True)
    store.mkdir("rows")
    return store
