"""Batches of a server of several models: behind requests, with few loads, and over restarts."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.integration.serving.test_pooled import MODELS, embed, loads_of, serving
from tests.waiting import until

from headrace.serving.auth import read_keys

ENDED = ("completed", "failed", "expired", "cancelled")
SLOW = MODELS.replace("name: small,", "name: small, batch_tokens: 16,").replace(
    "headrace.testing:FakeEngine,\n     engine_options: {dimension: 4}", "tests.integration.serving.engines:Gradual"
)
"""The first model takes 20 ms for each batch of some records."""


def line(number: int, model: str | None, url: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    content = {"input": f"text {number}"} if url == "/v1/embeddings" else {}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {**named, **content, **body}}


def begin(user: openai.OpenAI, rows: list[dict[str, Any]], endpoint: Any = "/v1/embeddings") -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = user.files.create(file=("in.jsonl", content), purpose="batch")
    return user.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h").id


def ended(user: openai.OpenAI, identity: str) -> Any:
    until(lambda: user.batches.retrieve(identity).status in ENDED)
    return user.batches.retrieve(identity)


def rows_of(user: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(row) for row in user.files.content(file).text.splitlines()]


def user_of(client: httpx.Client, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=key)


def loads(client: httpx.Client) -> dict[str, float]:
    return {name: found["loads"] for name, found in loads_of(client.get("/metrics").text).items()}


def test_openais_client_runs_batches_of_all_models_with_one_load_each(tmp_path: Path) -> None:
    rows = [line(number, ("small", "org/large", "text-embedding-3-small")[number % 3]) for number in range(300)]
    talk = [line(number, "talker", "/v1/completions", prompt="a b") for number in range(10)]
    with serving(tmp_path, state=tmp_path / "state") as client, user_of(client) as user:
        mixed, talking = begin(user, rows), begin(user, talk, "/v1/completions")
        done = ended(user, mixed)
        assert done.status == "completed", done.errors
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (300, 300, 0)
        found = {row["custom_id"]: row["response"]["body"] for row in rows_of(user, done.output_file_id)}
        assert len(found) == 300 == len({row["id"] for row in rows_of(user, done.output_file_id)})
        for number in range(300):
            body, large = found[f"r{number}"], number % 3 == 1
            assert len(body["data"][0]["embedding"]) == (16 if large else 4)
            assert body["model"] == rows[number]["body"]["model"]
        said = rows_of(user, ended(user, talking).output_file_id)
        assert {row["response"]["body"]["choices"][0]["text"] for row in said} == {"a b"}
        assert loads(client) == {"small": 1, "org/large": 1, "talker": 1}
        assert 'headrace_bulk_records_total{model=""} 310.0' in client.get("/metrics").text


def test_a_request_to_another_model_is_answered_first_and_the_batch_goes_on(tmp_path: Path) -> None:
    """What is in the engine's queue is finished before; it is not all."""
    text = SLOW.replace("batch_tokens: 16", "batch_tokens: 64")
    with serving(tmp_path, text, state=tmp_path / "state") as client, user_of(client) as user:
        identity = begin(user, [line(number, "small") for number in range(6_000)])
        until(lambda: user.batches.retrieve(identity).request_counts.completed > 0)  # type: ignore[union-attr]
        assert embed(client, "org/large").status_code == 200
        assert user.batches.retrieve(identity).status == "in_progress"
        done = ended(user, identity)
        assert done.request_counts.completed == 6_000
        ids = [row["custom_id"] for row in rows_of(user, done.output_file_id)]
        assert ids == [f"r{number}" for number in range(6_000)]
        assert loads(client)["small"] == 2


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    rows = [line(number, ("org/large", "small")[number % 2]) for number in range(600)]
    with serving(tmp_path, SLOW, state=tmp_path / "state") as client, user_of(client) as user:
        identity = begin(user, rows)
        until(lambda: user.batches.retrieve(identity).request_counts.completed > 320)  # type: ignore[union-attr]
    with serving(tmp_path, SLOW, state=tmp_path / "state") as client, user_of(client) as user:
        done = ended(user, identity)
        assert (done.status, done.request_counts.completed) == ("completed", 600)
        assert sorted(row["custom_id"] for row in rows_of(user, done.output_file_id)) == sorted(
            row["custom_id"] for row in rows
        )
        assert loads(client)["org/large"] == 0, "its requests were done"


@pytest.mark.parametrize(("names", "left"), [(("small", "org/large"), "tiny"), (("small", "small"), "talker")])
def test_a_batch_waits_for_a_server_that_has_its_model_and_keeps_its_lines(
    tmp_path: Path, names: tuple[str, str], left: str
) -> None:
    with serving(tmp_path, SLOW, state=tmp_path / "state") as client, user_of(client) as user:
        identity = begin(user, [line(number, names[number % 2]) for number in range(1500)])
        until(lambda: user.batches.retrieve(identity).request_counts.completed > 0)  # type: ignore[union-attr]
    others = SLOW.replace("name: small,", "name: tiny,").replace("text-embedding-3-small", "x")
    if left == "talker":  # and nothing for the endpoint
        others = "models:\n" + SLOW[SLOW.index("  - {name: talker") :]
    with serving(tmp_path, others, state=tmp_path / "state") as client, user_of(client) as user:
        time.sleep(0.1)
        assert user.batches.retrieve(identity).status == "in_progress"
        assert loads(client)[left] == 0
        user.batches.cancel(identity)
        done = ended(user, identity)
        assert done.status == "cancelled"
        found = [row["custom_id"] for row in rows_of(user, done.output_file_id)]
        assert 0 < len(found) == len(set(found)) == done.request_counts.completed


@pytest.mark.parametrize("back", [False, True])
def test_a_batch_moves_between_servers_of_one_and_of_several_models(tmp_path: Path, back: bool) -> None:
    one = "models:\n" + SLOW[SLOW.index("  - {name: small") : SLOW.index("  - {name: org/large")]
    first, second = (SLOW, one) if back else (one, SLOW)
    with serving(tmp_path, first, state=tmp_path / "state") as client, user_of(client) as user:
        identity = begin(user, [line(number, "small") for number in range(400)])
        until(lambda: user.batches.retrieve(identity).request_counts.completed > 0)  # type: ignore[union-attr]
    with serving(tmp_path, second, state=tmp_path / "state") as client, user_of(client) as user:
        done = ended(user, identity)
        assert (done.status, done.request_counts.completed) == ("completed", 400)
        computed = re.search(r"headrace_bulk_records_total\{.*\} ([0-9.]+)", client.get("/metrics").text)
        assert computed is not None
        assert float(computed[1]) < 400, "the first server computed some"


def test_a_model_that_cannot_be_loaded_keeps_no_other_requests_of_a_batch(tmp_path: Path) -> None:
    text = (
        f"{MODELS}  - {{name: broken, task: embed, engine: 'tests.integration.cluster.engines:broken', model: /no}}\n"
    )
    rows = [line(number, ("broken", "small")[number % 2]) for number in range(20)]
    with serving(tmp_path, text, state=tmp_path / "state") as client, user_of(client) as user:
        identity = begin(user, rows)
        until(lambda: user.batches.retrieve(identity).request_counts.completed == 10)  # type: ignore[union-attr]
        user.batches.cancel(identity)
        done = ended(user, identity)
        assert done.status == "cancelled"
        assert len(rows_of(user, done.output_file_id)) == 10


@pytest.mark.parametrize(
    ("model", "key", "code"),
    [
        (None, "k-alice", "missing_model"),
        ("talker", "k-alice", "model_not_found"),
        ("small", "k-bob", "model_not_allowed"),
    ],
)
def test_a_batch_names_models_that_its_key_may_use(tmp_path: Path, model: str | None, key: str, code: str) -> None:
    (tmp_path / "keys").write_text("alice k-alice\nbob k-bob\n")
    text = MODELS.replace("name: small,", "name: small, keys: [alice],")
    keys = read_keys(tmp_path / "keys", None)
    with serving(tmp_path, text, keys=keys, state=tmp_path / "state") as client, user_of(client, key) as user:
        done = ended(user, begin(user, [line(0, "org/large"), line(1, model)]))
        assert done.status == "failed"
        assert [(error.line, error.code) for error in done.errors.data] == [(2, code)]
        assert "--served-model-name" not in done.errors.data[0].message
