"""`kill -9` of a server with a batch: the next one goes on, and every custom_id is there once."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import httpx
from openai import OpenAI
from tests.acceptance.serving.process import server
from tests.acceptance.serving.requests import ended
from tests.waiting import until

COUNT = 2_000
SERVE = (
    "--engine",
    "tests.acceptance.engines:slow",
    "--task",
    "embed",
    "--batch-tokens",
    "256",
    "--state-dir",
    "state",
)


def has_completed(client: OpenAI, identity: str, enough: int) -> bool:
    counts = client.batches.retrieve(identity).request_counts
    return counts is not None and counts.completed >= enough


def test_a_batch_survives_kills(tmp_path: Path) -> None:
    rows = [
        {"custom_id": f"id-{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"some text {n}"}}
        for n in range(COUNT)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    identity = ""
    for enough in (1, COUNT // 4, COUNT // 2):
        with (
            server(*SERVE, folder=tmp_path) as (process, url),
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            if not identity:
                file = client.files.create(file=tmp_path / "in.jsonl", purpose="batch")
                identity = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
                ).id
            until(functools.partial(has_completed, client, identity, enough), math.inf)
            process.kill()
    with (
        server(*SERVE, folder=tmp_path) as (_, url),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        done = ended(client, identity)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (COUNT, 0)
        assert done.output_file_id is not None
        output = client.files.content(done.output_file_id).text.splitlines()
        assert [json.loads(row)["custom_id"] for row in output] == [f"id-{n}" for n in range(COUNT)]
        assert _computed(url) <= COUNT - enough  # what had been written was not computed again


def _computed(url: str) -> float:
    """Records that this server's model has done."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("headrace_records_total"))
