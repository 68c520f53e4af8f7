"""A hub on loopback, and an empty cache of its client."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.hub.killing import sharded_model
from tests.integration.hub.standin import Hub, running_hub
from tests.small_models import text_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test here runs the command, which imports PyTorch several times: slow where the cores are busy."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def listening() -> Iterator[socket.socket]:
    """All hubs have one address, so that processes can be forked from one whose client has read it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise for the client's folder."""
    return tmp_path_factory.mktemp("hub") / "hf"


@pytest.fixture
def cache(cache_path: Path) -> Iterator[Path]:
    """The client's folder, which it is to make."""
    yield cache_path
    shutil.rmtree(cache_path, ignore_errors=True)


@pytest.fixture
def hub(cache: Path, listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that processes started by a test talk to."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(cache))
    with running_hub(listening) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder as a local folder."""
    return text_model(tmp_path_factory.mktemp("encoder"), head=False)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder whose weights are in many files: 20 MB in all."""
    return sharded_model(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The user's folder, with an input."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "x.jsonl").write_text('{"text": "the canal"}\n{"text": "feeds the mill"}\n')
    return folder
