"""A disk that fills up under the Batch API: told to the client, nothing else of the server is touched."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from tests.acceptance.command import FAKE
from tests.acceptance.serving.process import server
from tests.acceptance.serving.requests import ended

LIMIT = 250_000
"""Bytes of a file, beyond which a write fails: what a full disk looks like to a program."""


def test_a_batch_that_fills_the_disk_fails_alone(tmp_path: Path) -> None:
    with (
        server(*FAKE, "--state-dir", "state", folder=tmp_path, file_bytes=LIMIT) as (process, url),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        failed = _run(client, tmp_path, 1_200)  # of which the output is several times as long
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        message = str(failed.errors.data[0].message)
        assert "File too large" in message or "cannot write" in message
        assert str(tmp_path) not in message

        # A longer one is put into the temporary folder first.
        for size, place in ((2 * LIMIT, f"{2 * LIMIT:,} bytes"), (2_000_000, "temporary folder")):
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=("in.jsonl", b"x" * size), purpose="batch")
            assert refused.value.status_code == 507
            assert place in refused.value.message
        assert not list((tmp_path / "state").rglob("*.tmp"))

        assert process.poll() is None
        assert len(client.embeddings.create(model="all-MiniLM-L6-v2", input="a").data[0].embedding) == 8
        assert _run(client, tmp_path, 50).status == "completed"


def _run(client: OpenAI, folder: Path, count: int) -> Batch:
    rows = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {n}"}}
        for n in range(count)
    )
    path = folder / f"{count}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = client.files.create(file=path, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    return ended(client, batch.id)
