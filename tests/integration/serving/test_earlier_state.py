"""A state folder that version 0.1.0 has written, when batches were dictionaries, goes on in this version."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import ended, rows_of
from tests.settings import server_settings

from headrace.app.servers.server import build
from headrace.errors import ConfigError
from headrace.serving.batches.batch import BatchStatus, StoredBatch
from headrace.serving.limits import ServeLimits

WRITTEN = Path(__file__).parent / "earlier_state"
COMPLETED = "batch_e4312a3ee3fb428fac93841067d609c3"
FAILED = "batch_371886a6fbe64b0990b9b5c82d7e6db8"
IN_PROGRESS = "batch_6725344629fe4af2acca8ff32886bff8"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder, as if its batches expired in an hour."""
    shutil.copytree(WRITTEN, tmp_path / "state")
    for path in (tmp_path / "state" / "batches").glob("*.json"):
        path.write_text(re.sub(r'("expires_at": )\d+', rf"\g<1>{int(time.time()) + 3600}", path.read_text()))
    return tmp_path / "state"


def serve(state: Path) -> Any:
    return running(
        server_settings(task="embed", engine="headrace.testing:FakeEngine", state=state, limits=ServeLimits(drain_s=2))
    )


def outputs(server: Running, batch: dict[str, Any]) -> list[str]:
    return sorted(row["custom_id"] for row in rows_of(server, batch["output_file_id"]))


def test_batches_of_an_earlier_version_are_there_and_go_on(state: Path) -> None:
    with serve(state) as server:
        listed = server.client.get("/v1/batches").json()["data"]
        assert {batch["id"] for batch in listed} == {COMPLETED, FAILED, IN_PROGRESS}
        completed, failed = (server.client.get(f"/v1/batches/{name}").json() for name in (COMPLETED, FAILED))
        assert completed["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert outputs(server, completed) == ["r0", "r1", "r2"]
        assert [error["code"] for error in failed["errors"]["data"]] == ["invalid_json_line"]
        continued = ended(server, IN_PROGRESS)
        assert (continued["status"], continued["request_counts"]["completed"]) == ("completed", 6)
        assert outputs(server, continued) == [f"r{n}" for n in range(6)]


def test_the_folder_of_a_newer_version_is_named_and_left_alone(state: Path) -> None:
    with serve(state):
        pass
    mark = json.loads((state / "format.json").read_text())
    assert mark["format"] == 1
    (state / "format.json").write_text(json.dumps({"format": 2, "version": "9.8.7"}))
    before = {path: path.read_bytes() for path in state.rglob("*.json")}
    with pytest.raises(ConfigError, match=r"Headrace 9\.8\.7 has written .*format 2.*another folder as state"):
        api_of(state)
    (state / "format.json").write_text("{")
    with pytest.raises(ConfigError, match=r"format\.json is damaged"):
        api_of(state)
    (state / "format.json").write_text(json.dumps({"format": 2, "version": "9.8.7"}))
    assert before == {path: path.read_bytes() for path in state.rglob("*.json")}


def api_of(state: Path) -> None:
    app, _ = build(server_settings(task="embed", engine="headrace.testing:FakeEngine", state=state))

    async def enter() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    asyncio.run(enter())


@pytest.mark.parametrize("identity", [COMPLETED, FAILED, IN_PROGRESS])
def test_a_batch_is_written_as_it_was_read(identity: str) -> None:
    content = (WRITTEN / "batches" / f"{identity}.json").read_bytes()
    assert StoredBatch.decode(content).encode() == content


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"7", b'"x"', (WRITTEN / f"batches/{COMPLETED}.json").read_bytes().replace(b"completed", b"x")],
)
def test_a_damaged_batch_is_refused(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        StoredBatch.decode(content)


def test_open_batches_are_those_that_have_not_ended() -> None:
    assert {status for status in BatchStatus if status.is_open} == {
        BatchStatus.VALIDATING,
        BatchStatus.IN_PROGRESS,
        BatchStatus.FINALIZING,
        BatchStatus.CANCELLING,
    }
