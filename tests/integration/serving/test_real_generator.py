"""The real generator behind the server: an answer that is streamed is the answer that is given whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.serving.running import Running, running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="generate", engine_options={"max_num_seqs": 4}))) as server:
        yield server


def streamed(server: Running, body: dict[str, Any]) -> list[str]:
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]]


@pytest.mark.parametrize("options", [{}, {"stop": ["77"]}, {"temperature": 1.0, "seed": 3}])
def test_the_pieces_make_the_whole(server: Running, options: dict[str, Any]) -> None:
    body = {"prompt": "12+30=", "max_tokens": 16, "ignore_eos": True, **options}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    pieces = streamed(server, body)
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 2 or len(whole) < 3
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == whole


def test_an_answer_counts_for_no_more_than_the_context(server: Running) -> None:
    assert server.host.loaded is not None
    assert server.host.loaded.most_cost == server.engine.profile.max_model_len == 512


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-320, "top_p": 1e-300},
        {"temperature": 1e-12, "top_k": 5},
        {"temperature": 1e-9, "repetition_penalty": 1e-300},
        {"temperature": 100, "repetition_penalty": 1e-300, "min_p": 1, "frequency_penalty": -2},
    ],
)
def test_extreme_numbers_are_answered(server: Running, options: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"prompt": "12+30=", "max_tokens": 8, **options})
    assert response.status_code == 200, response.text


def test_usage_tells_how_many_prompt_tokens_were_in_the_prefix_cache(server: Running) -> None:
    shared = "1+2=3; " * 15
    page = 32

    def cached(question: str, **more: Any) -> int:
        body = {"prompt": shared + question, "max_tokens": 2, **more}
        usage = server.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens"] == len(shared + question)
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("4+4=") == 0
    assert cached("5+5=") == len(shared) // page * page
    assert cached("6+6=", n=2, temperature=1) == len(shared) // page * page  # a prompt counts once
    body = {"prompt": shared, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert json.loads(lines[-2])["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    chat = {"messages": [{"role": "user", "content": shared}], "max_tokens": 2}
    first, second = (server.post("/v1/chat/completions", chat).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]
