"""One server per state folder: a second one is refused, and the first one's batches go on."""

from __future__ import annotations

from pathlib import Path

from openai import OpenAI
from tests.acceptance.command import headrace, lines_of
from tests.acceptance.serving.process import server
from tests.acceptance.serving.requests import begin, ended
from tests.waiting import until

SLOW = ("--engine", "tests.acceptance.engines:slow", "--task", "embed", "--batch-tokens", "64", "--state-dir", "state")


def completed(client: OpenAI, identity: str) -> int:
    counts = client.batches.retrieve(identity).request_counts
    return counts.completed if counts is not None else 0


def test_a_second_server_is_refused_and_a_killed_one_is_succeeded(tmp_path: Path) -> None:
    with (
        server(*SLOW, folder=tmp_path) as (process, url),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        identity = begin(client, tmp_path, 2_000).id
        status, said = headrace("serve", "--port", "0", *SLOW, folder=tmp_path)
        assert status == 2
        assert len(lines_of(said)) == 1
        assert str(process.pid) in said
        assert "--state-dir" in said
        before = completed(client, identity)
        until(lambda: completed(client, identity) > before)  # the refused one has not stopped it
        process.kill()
    with (
        server(*SLOW, folder=tmp_path) as (_, url),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert ended(client, identity).status == "completed"
