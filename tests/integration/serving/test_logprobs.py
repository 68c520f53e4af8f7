"""Log probabilities of answers are those of the model, by both engines, whole and in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_batches import begin, ended, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.options import Generation

PROMPT = "Q: 12+34\nA: "
CHAT = {"messages": [{"role": "user", "content": "12+34"}]}
ENGINES = "tests.integration.serving.engines"


@pytest.fixture(scope="module", params=["torch", "static"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = EngineConfig("generate", engine=request.param)
    with running(ServerSettings(config, name="arithmetic", state=tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    """Of each token of the greedy answer: the log probabilities of all tokens, by transformers."""
    words = AutoTokenizer.from_pretrained(str(ARITHMETIC))
    model = AutoModelForCausalLM.from_pretrained(str(ARITHMETIC), dtype=torch.float32).eval()
    ids = words(PROMPT, return_tensors="pt").input_ids
    rows: list[dict[str, float]] = []
    with torch.inference_mode():
        while True:
            logprobs = model(ids).logits[0, -1].log_softmax(-1)
            token = int(logprobs.argmax())
            if token == words.eos_token_id:
                return rows
            rows.append({words.decode([place]): float(value) for place, value in enumerate(logprobs)})
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def ask(server: Running, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return dict(choice)


def check(content: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    assert len(content) == len(expected)
    for one, row in zip(content, expected, strict=True):
        assert one["logprob"] == pytest.approx(row[one["token"]], abs=1e-3)
        assert bytes(one["bytes"]).decode() == one["token"]
        best = sorted(row.items(), key=lambda item: -item[1])[: len(one["top_logprobs"])]
        assert [other["token"] for other in one["top_logprobs"]] == [token for token, _ in best]
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(
            [logprob for _, logprob in best], abs=1e-3
        )


def test_a_chat(server: Running, expected: list[dict[str, float]]) -> None:
    choice = ask(server, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=3)
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert {len(one["top_logprobs"]) for one in content} == {3}
    check(content, expected)
    alone = ask(server, "/v1/chat/completions", **CHAT, logprobs=True)["logprobs"]["content"]
    assert [one["top_logprobs"] for one in alone] == [[]] * len(expected)
    assert ask(server, "/v1/chat/completions", **CHAT)["logprobs"] is None


def test_a_completion(server: Running, expected: list[dict[str, float]]) -> None:
    choice = ask(server, "/v1/completions", prompt=PROMPT, logprobs=2)
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [sum(map(len, found["tokens"][:place])) for place in range(len(found["tokens"]))]
    for token, logprob, top, row in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], expected, strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=1e-3)
        assert len(top) == 2
    assert ask(server, "/v1/completions", prompt=PROMPT, logprobs=0)["logprobs"]["top_logprobs"][0] == {}


def test_sampled_tokens_have_the_probability_of_the_model_itself(server: Running) -> None:
    """Not that of the heated distribution that they are drawn from."""
    first = ask(server, "/v1/completions", prompt=PROMPT, temperature=50.0, seed=3, max_tokens=1, logprobs=20)
    logprobs = first["logprobs"]
    assert sum(map(math.exp, logprobs["top_logprobs"][0].values())) == pytest.approx(1, abs=0.01)
    assert min(logprobs["top_logprobs"][0].values()) < -5


def test_a_stop_string_ends_them_too(server: Running) -> None:
    whole = ask(server, "/v1/completions", prompt=PROMPT)["text"]
    cut = ask(server, "/v1/completions", prompt=PROMPT, stop=[whole[3]], logprobs=0)
    assert cut["text"] == whole[: whole.index(whole[3])]
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]


def test_lines_of_a_batch(server: Running, expected: list[dict[str, float]]) -> None:
    url = "/v1/chat/completions"
    row = {"custom_id": "1", "method": "POST", "url": url, "body": {**CHAT, "logprobs": True, "top_logprobs": 1}}
    [answer] = rows_of(server, ended(server, begin(server, [row], url))["output_file_id"])
    check(answer["response"]["body"]["choices"][0]["logprobs"]["content"], expected)


def test_openais_client_reads_them(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(model="arithmetic", **CHAT, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        text = client.completions.create(model="arithmetic", prompt=PROMPT, logprobs=1)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.token_logprobs is not None


def test_a_stream_has_them_at_its_end(server: Running) -> None:
    chat = ask(server, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2)["logprobs"]
    text = ask(server, "/v1/completions", prompt=PROMPT, logprobs=1)["logprobs"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        pieces = list(client.completions.create(model="arithmetic", prompt=PROMPT, logprobs=1, stream=True))
        assert [one.choices[0].logprobs for one in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].choices[0].logprobs.model_dump() == text
        with client.chat.completions.stream(model="arithmetic", **CHAT, logprobs=True, top_logprobs=2) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].logprobs is not None
        assert final.choices[0].logprobs.model_dump()["content"] == chat["content"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": 1.0}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": 1, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    asked = CHAT if "chat" in path else {"prompt": PROMPT}
    response = server.post(path, {**asked, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_an_engine_without_them_refuses() -> None:
    with running(ServerSettings(EngineConfig("generate", engine=f"{ENGINES}:Talker"))) as server:
        response = server.post("/v1/chat/completions", {**CHAT, "logprobs": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


def test_an_answer_that_was_interrupted_has_all_of_them() -> None:
    from headrace.engines.generation.continuous import GenerationEngine

    engine = GenerationEngine(Generation(max_num_seqs=2))
    [asked] = engine.prepare([{"prompt": PROMPT, "logprobs": 2}])
    assert not isinstance(asked, Exception)

    def to_the_end(key: int) -> Any:
        while True:
            for found, answer in engine.step():
                assert found == key
                return answer

    engine.add(1, asked.payload)
    whole = to_the_end(1)
    engine.add(2, asked.payload)
    for _ in range(4):
        assert engine.step() == []
    resumed = engine.remove(2)
    assert resumed is not None
    engine.add(3, resumed)
    again = to_the_end(3)
    assert [one["token"] for one in again["logprobs"]] == [one["token"] for one in whole["logprobs"]]
    for one, other in zip(again["logprobs"], whole["logprobs"], strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    engine.close()
