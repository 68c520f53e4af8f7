"""A job from and to Google Cloud Storage, by a server of its API on loopback: what S3's tests show, once more."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import FAKE, headrace, start
from tests.waiting import until

ROWS = 2_000
IDS = list(range(ROWS))
SLOW = (*FAKE, "--seconds-per-batch", "0.2", "--batch-size", "2")


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system, with an empty bucket named `rows`; jobs that are started meanwhile see the same."""
    gcsfs = pytest.importorskip("gcsfs.core")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC, which this server does not speak
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="rows")
    server.start()
    store = gcsfs.GCSFileSystem(endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], token="anon")
    store.pipe_file("rows/in.jsonl", b"".join(b'{"id":%d,"text":"text %d"}\n' % (n, n) for n in IDS))
    yield store
    store.clear_instance_cache()
    server.stop()


def names(gs: Any) -> list[str]:
    gs.invalidate_cache()
    return sorted(gs.find("rows"))


def test_killed_refused_and_continued(gs: Any, tmp_path: Path) -> None:
    command = ("run", "-i", "gs://rows/in.jsonl", "-o", "gs://rows/out.jsonl")
    first = start(*command, *SLOW, folder=tmp_path)
    until(lambda: any("/part-" in name for name in names(gs)), of=first)
    status, said = headrace(*command, *FAKE, folder=tmp_path)
    assert status == 2
    assert f"gs://rows/out.jsonl is being written by process {first.pid} on " in said
    first.kill()
    first.communicate()
    status, said = headrace(*command, *FAKE, folder=tmp_path)
    assert status == 0, said
    assert [json.loads(line)["id"] for line in gs.cat_file("rows/out.jsonl").splitlines()] == IDS
    status, said = headrace(*command, *FAKE, folder=tmp_path)
    assert status == 0
    assert "already finished: 2,000 records" in said


def test_a_folder_of_parts(gs: Any, tmp_path: Path) -> None:
    status, said = headrace("run", "-i", "gs://rows/in.jsonl", "-o", "gs://rows/out.parquet/", *FAKE, folder=tmp_path)
    assert status == 0, said
    parts = [name for name in names(gs) if name.startswith("rows/out.parquet/part-")]
    assert [n for part in parts for n in pq.read_table(io.BytesIO(gs.cat_file(part)))["id"].to_pylist()] == IDS
    assert "rows/out.parquet/_headrace/lock" not in names(gs)
