"""Models in S3: downloaded once, each file whole or not at all; a job stays with the version that it was begun with."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.small_models import text_model

import headrace
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import fetch, moved, resolve, served_names
from headrace.errors import ConfigError, EngineError, JobError
from headrace.jobs.settings import Limits

ADDRESS = "s3://rows/models/mini"
CONFIG = EngineConfig("embed", ADDRESS)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("encoder"), head=False)


@pytest.fixture
def stored(s3: Any, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store with the model, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in encoder.iterdir():
        s3.put(str(path), f"rows/models/mini/{path.name}")
    s3.pipe("rows/models/mini/pytorch_model.bin", b"a copy")
    return s3


def test_a_model_is_downloaded_once(stored: Any, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(CONFIG)
    assert config.commit is not None and served_names(config) == ("mini", ADDRESS)
    folder = Path(str(fetch(config)))
    names = {path.name for path in encoder.iterdir()}
    assert {path.name for path in folder.iterdir()} == {*names, "listing.json"}  # and no copy
    assert all((folder / name).read_bytes() == (encoder / name).read_bytes() for name in names)

    monkeypatch.setattr(stored, "get_file", None)
    monkeypatch.setattr(stored, "find", None)
    assert fetch(config) == folder


@pytest.mark.usefixtures("stored")
def test_a_client_that_another_library_has_registered_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing flyte does."""
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", MemoryFileSystem)
    assert resolve(CONFIG).commit is not None


def test_a_job_runs_and_goes_on_with_the_version_it_was_begun_with(stored: Any, tmp_path: Path) -> None:
    rows = [{"text": "the canal"}, {"text": 5}]
    sink = tmp_path / "y.jsonl"
    settings: dict[str, Any] = {"sink": sink, "task": "embed", "progress": False}
    with pytest.raises(JobError):
        headrace.run(rows, ADDRESS, limits=Limits(max_errors=0), **settings)
    begun = resolve(CONFIG).commit
    assert moved(resolve(CONFIG)) is None
    stored.pipe("rows/models/mini/config.json", b"another")
    report = headrace.run(rows, ADDRESS, limits=Limits(max_error_rate=1), **settings)
    assert (report.state, report.model) == ("finished", f"{ADDRESS} at commit {begun}")
    assert resolve(CONFIG).commit != begun


def test_a_version_that_is_gone_is_refused(stored: Any, tmp_path: Path) -> None:
    config = resolve(CONFIG)
    stored.pipe("rows/models/mini/tokenizer_config.json", b"{}")
    newest = moved(config)
    assert newest not in (None, config.commit)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ConfigError, match="has changed, and version"):
        fetch(config)


def test_a_download_that_fails_leaves_no_half_file(
    stored: Any, encoder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = resolve(CONFIG)
    get_file = stored.get_file

    def cut(place: str, path: str) -> None:
        if place.endswith(".safetensors"):
            Path(path).write_bytes(b"half")
            raise OSError("connection reset")
        get_file(place, path)

    with monkeypatch.context() as patched:
        patched.setattr(stored, "get_file", cut)
        with pytest.raises(EngineError, match="cannot be read from the store: connection reset"):
            fetch(config)
    assert not list((tmp_path / "cache").rglob("*safetensors*"))
    folder = Path(str(fetch(config)))
    assert (folder / "model.safetensors").read_bytes() == (encoder / "model.safetensors").read_bytes()


def test_an_address_without_files_is_refused(stored: Any) -> None:
    for address in ("s3://rows/models/none", "s3://no-such-bucket/model"):
        with pytest.raises(ConfigError, match=f"model '{address}'"):
            resolve(EngineConfig("embed", address))


def test_a_file_outside_of_the_model_is_refused(stored: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = stored.find("rows/models/mini", detail=True)
    outside = {"rows/models/mini/../../evil.json": {"size": 1}}
    monkeypatch.setattr(stored, "find", lambda place, detail: {**found, **outside})
    with pytest.raises(ConfigError, match="would lie outside of its folder"):
        resolve(CONFIG)
    assert not (tmp_path / "cache").exists()
