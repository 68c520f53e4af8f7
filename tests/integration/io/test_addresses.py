"""Addresses other than S3: http by a real server on loopback, and what is said where nothing answers."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace
from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.storage import locations
from headrace.jobs.settings import Limits

ROWS = [{"id": n, "text": f"text {n}"} for n in range(1000)]
FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False, "limits": Limits(part_records=100)}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a folder with some inputs."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "site"
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (folder / "in.jsonl").write_bytes(lines)
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "in.parquet", row_group_size=100)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="site", daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.parquet"])
def test_a_file_on_a_web_server_is_an_input_and_known_again(site: str, tmp_path: Path, name: str) -> None:
    sink = tmp_path / "out.jsonl"
    assert headrace.run(f"{site}/{name}", sink=sink, **FAKE).ok == 1000
    assert [json.loads(line)["id"] for line in sink.read_text().splitlines()] == list(range(1000))
    assert headrace.run(f"{site}/{name}", sink=sink, **FAKE).ok == 0, "it is finished"
    (tmp_path / "site" / name).write_bytes((tmp_path / "site" / "in.jsonl").read_bytes()[:-1])
    with pytest.raises((ResumeMismatchError, ConfigError, JobError)):
        headrace.run(f"{site}/{name}", sink=sink, **FAKE)


def test_what_is_not_there_and_who_does_not_answer(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "RETRIES", replace(locations.RETRIES, max_backoff_s=0.01))
    with pytest.raises(ConfigError, match=r"cannot read input file .*/none\.jsonl: not found"):
        headrace.run(f"{site}/none.jsonl", sink=tmp_path / "out.jsonl", **FAKE)
    with pytest.raises(ConfigError, match=r"cannot read input file .*: ClientConnectorError: Cannot connect to host"):
        headrace.run("http://127.0.0.1:1/in.jsonl", sink=tmp_path / "out.jsonl", **FAKE)
    with pytest.raises(ConfigError, match=r"cannot write .*such an address can only be read"):
        headrace.run(f"{site}/in.jsonl", sink=f"{site}/out.jsonl", **FAKE)


def test_a_hub_out_of_reach_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the hub is one that nothing answers to."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(locations, "RETRIES", replace(locations.RETRIES, max_backoff_s=0.01))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"cannot read input file hf://.*: ConnectError: "):
        headrace.run("hf://datasets/some/rows/in.parquet", sink=tmp_path / "out.jsonl", **FAKE)


@pytest.mark.parametrize("setting", ["source", "sink", "model"])
def test_a_name_that_no_file_can_have_is_refused_shortened(setting: str, tmp_path: Path) -> None:
    given = {"source": [{"text": "a"}], "sink": tmp_path / "out.jsonl", "progress": False}
    for name in ("x" * 100_000, "a\0b"):
        with pytest.raises(ConfigError) as refused:
            headrace.run(**{**given, setting: name if setting != "sink" else f"{name}.jsonl"})
        assert len(str(refused.value)) < 400
    with pytest.raises(ConfigError, match="File name too long"):
        headrace.build_app(model="x" * 100_000)


def test_an_error_of_user_code_about_a_file_stays_its_own(tmp_path: Path) -> None:
    def engine(model: str, **_: object) -> object:
        return open(tmp_path / "missing")  # noqa: PTH123 - what users write

    with pytest.raises(FileNotFoundError):
        headrace.run(["a"], "m", engine=engine, sink=tmp_path / "out.jsonl", progress=False)


@pytest.mark.parametrize("address", ["hf://datasets/", "hf://", "hf://datasets", "hf://spaces/", "hf://a", "s3://"])
def test_an_address_without_a_place_is_refused_with_the_way_out(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names no .*; write"):
        headrace.run(address, sink=tmp_path / "out.jsonl", **FAKE)
