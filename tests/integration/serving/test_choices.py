"""Several choices for a prompt (`n`), whole, streamed and in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import begin, ended, rows_of

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

CHAT = {"messages": [{"role": "user", "content": "2+3"}], "temperature": 4.0, "max_tokens": 8}
PROMPTS = {"prompt": ["2+3", "4+5"], "temperature": 4.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("generate"), state=tmp_path_factory.mktemp("state"))) as server:
        yield server


def ask(server: Running, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_without_a_seed_choices_differ_and_the_same_request_gets_others_again(server: Running) -> None:
    one, three, again = (ask(server, "/v1/chat/completions", **CHAT, n=n) for n in (1, 3, 3))
    said = [choice["message"]["content"] for answer in (one, three, again) for choice in answer["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert len(set(said)) == 7
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] > one["usage"]["completion_tokens"]


def test_a_seed_gives_each_choice_its_own(server: Running) -> None:
    both = ask(server, "/v1/chat/completions", **CHAT, n=2, seed=7)["choices"]
    alone = [ask(server, "/v1/chat/completions", **CHAT, seed=seed)["choices"][0] for seed in (7, 8)]
    assert [choice["message"] for choice in both] == [choice["message"] for choice in alone]
    assert ask(server, "/v1/chat/completions", **CHAT, n=2, seed=7)["choices"] == both
    top = ask(server, "/v1/chat/completions", **CHAT, n=2, seed=(1 << 63) - 1)
    assert len(top["choices"]) == 2


def test_choices_of_several_prompts_come_prompt_by_prompt(server: Running) -> None:
    one, two = (ask(server, "/v1/completions", **PROMPTS, n=n, seed=5) for n in (1, 2))
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [two["choices"][place]["text"] for place in (0, 2)] == [choice["text"] for choice in one["choices"]]
    assert two["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_a_stream_has_all_choices(server: Running) -> None:
    whole = ask(server, "/v1/chat/completions", **CHAT, n=3, seed=5)
    body = {**CHAT, "n": 3, "seed": 5, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    *chunks, last = (json.loads(line.removeprefix("data: ")) for line in lines[:-2])
    said, roles = ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        [choice] = chunk["choices"]
        said[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert said == [choice["message"]["content"] for choice in whole["choices"]]
    assert roles == [1, 1, 1]
    assert last["usage"] == whole["usage"]


def test_lines_of_a_batch_have_all_choices(server: Running) -> None:
    for url, body in (("/v1/completions", PROMPTS), ("/v1/chat/completions", CHAT)):
        whole = ask(server, url, **body, n=2, seed=5)
        row = {"custom_id": "1", "method": "POST", "url": url, "body": {**body, "n": 2, "seed": 5}}
        done = ended(server, begin(server, [row], url))
        [answer] = rows_of(server, done["output_file_id"])
        assert answer["response"]["body"]["choices"] == whole["choices"]
        assert whole["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}  # depends on other requests
        assert answer["response"]["body"]["usage"] == whole["usage"]


def test_without_a_seed_equal_lines_of_a_batch_differ_and_are_the_same_in_the_next(server: Running) -> None:
    url = "/v1/chat/completions"
    rows = [{"custom_id": str(n), "method": "POST", "url": url, "body": {**CHAT, "n": 2}} for n in range(2)]
    one, other = (rows_of(server, ended(server, begin(server, rows, url))["output_file_id"]) for _ in range(2))
    said, again = (
        [choice["message"]["content"] for row in lines for choice in row["response"]["body"]["choices"]]
        for lines in (one, other)
    )
    assert len(set(said)) == 4
    assert said == again


def test_lines_of_a_batch_take_token_ids(server: Running) -> None:
    url = "/v1/completions"
    bodies = [{"prompt": PROMPTS["prompt"]}]
    bodies.append({"prompt": [server.post("/tokenize", {"prompt": one}).json()["tokens"] for one in PROMPTS["prompt"]]})
    rows = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    rows.append({"custom_id": "2", "method": "POST", "url": url, "body": {"prompt": [99_999]}})
    done = ended(server, begin(server, rows, url))
    text, ids = (row["response"]["body"]["choices"] for row in rows_of(server, done["output_file_id"]))
    assert ids == text
    [bad] = rows_of(server, done["error_file_id"])
    assert "99999" in bad["error"]["message"]


@pytest.mark.parametrize("n", [0, 129, True, 1.5, "2"])
def test_a_wrong_number_of_choices_is_refused(server: Running, n: object) -> None:
    response = server.post("/v1/chat/completions", {**CHAT, "n": n})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_too_many_choices_are_refused(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": ["x"] * 20, "n": 128})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert "2048" in response.json()["error"]["message"]
