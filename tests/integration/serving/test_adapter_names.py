"""Adapters of a server's model, which requests of each protocol choose by the name of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.integration.engines.test_adapters import LAYERS, adapter, halves
from tests.integration.serving.running import Running, running
from tests.integration.serving.test_pooled import serving
from tests.integration.serving.test_pooled_batches import begin, ended, line, rows_of
from transformers import AutoModelForCausalLM

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.errors import ConfigError

PROMPT = "1+2+3+4+5="
NAMES = ("arithmetic", "support", "legal")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    module = AutoModelForCausalLM.from_pretrained(ARITHMETIC, dtype=torch.float32)
    return {
        "support": str(adapter(root / "support", halves(module, LAYERS["generate"]))),
        "legal": str(adapter(root / "legal", halves(module, LAYERS["generate"][:1], rank=3), r=3)),
    }


def settings(folders: dict[str, str], **more: Any) -> ServerSettings:
    options = {"adapters": folders, "dtype": "float32", "max_tokens": 6}
    return ServerSettings(EngineConfig(task="generate", engine_options=options), **more)


@pytest.fixture(scope="module")
def server(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings(folders, state=tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Running) -> dict[str, str]:
    """The answer of each name, by the field adapter."""
    fields: list[dict[str, Any]] = [{}, {"adapter": "support"}, {"adapter": "legal"}]
    found = {name: openai_text(server, more) for name, more in zip(NAMES, fields, strict=True)}
    assert len(set(found.values())) == 3
    return found


def openai_text(server: Running, body: dict[str, Any]) -> str:
    text: str = server.post("/v1/completions", {"prompt": PROMPT, **body}).json()["choices"][0]["text"]
    return text


def test_adapters_are_listed_as_models(server: Running) -> None:
    listed = {one["id"]: one.get("parent") for one in server.client.get("/v1/models").json()["data"]}
    assert listed == {"arithmetic": None, "support": "arithmetic", "legal": "arithmetic"}
    assert server.client.get("/v1/models/legal").json()["parent"] == "arithmetic"
    assert {one["name"] for one in server.client.get("/api/tags").json()["models"]} == set(NAMES)
    refused = server.post("/v1/completions", {"prompt": PROMPT, "model": "other"})
    assert refused.status_code == 404
    assert all(repr(name) in refused.json()["error"]["message"] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_protocol_chooses_an_adapter_by_the_models_name(
    server: Running, expected: dict[str, str], name: str
) -> None:
    whole = server.post("/v1/completions", {"prompt": PROMPT, "model": name, "n": 2}).json()
    assert whole["model"] == name
    assert [one["text"] for one in whole["choices"]] == [expected[name]] * 2
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "model": name, "stream": True}
    ) as response:
        pieces = [json.loads(one[6:]) for one in response.iter_lines() if one and one != "data: [DONE]"]
    assert "".join(one["choices"][0]["text"] for one in pieces) == expected[name]
    assert {one["model"] for one in pieces} == {name}
    raw = {"prompt": PROMPT, "raw": True, "stream": False}
    told = server.post("/api/generate", {"model": f"{name}:latest", **raw}).json()
    assert (told["model"], told["response"]) == (name, expected[name])
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    told = server.post(f"/v2/models/{name}/infer", {"inputs": [tensor]}).json()
    assert (told["model_name"], told["outputs"][0]["data"]) == (name, [expected[name]])
    assert server.post(f"/predictions/{name}", {"data": PROMPT}).json() == expected[name]
    tuned = {} if name == "arithmetic" else {"parameters": {"adapter_id": name}}
    assert server.post("/generate", {"inputs": PROMPT, **tuned}).json()["generated_text"] == expected[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/responses", {}),
        ("/v1/messages", {"max_tokens": 6}),
        ("/api/chat", {"stream": False}),
        ("/v2/chat", {"stream": False}),
    ],
)
def test_a_chat_chooses_an_adapter_by_the_models_name(
    server: Running, name: str, path: str, more: dict[str, Any]
) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    named = {} if name == NAMES[0] else {"adapter": name}
    told = server.post("/v1/chat/completions", {"messages": chat, **named}).json()
    body = {"input" if path == "/v1/responses" else "messages": chat, **more}
    answer = server.post(path, {"model": name, **body}).json()
    assert answer.get("model", name) == name, answer
    assert json.dumps(told["choices"][0]["message"]["content"]) in json.dumps(answer)


def test_the_field_and_the_model_may_not_name_two(server: Running, expected: dict[str, str]) -> None:
    assert openai_text(server, {"model": "arithmetic", "adapter": "legal"}) == expected["legal"]
    assert openai_text(server, {"model": "legal", "adapter": "legal"}) == expected["legal"]
    refused = server.post("/v1/completions", {"prompt": PROMPT, "model": "legal", "adapter": "support"})
    assert refused.status_code == 400
    assert "adapter is 'support', and model names another, 'legal'" in refused.json()["error"]["message"]


def test_lines_of_a_batch_choose_adapters(server: Running, expected: dict[str, str]) -> None:
    rows = [line(number, name, "/v1/completions", prompt=PROMPT) for number, name in enumerate(NAMES)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as user:
        done = ended(user, begin(user, rows, "/v1/completions"))
        bodies = {row["custom_id"]: row["response"]["body"] for row in rows_of(user, done.output_file_id)}
    for number, name in enumerate(NAMES):
        body = bodies[f"r{number}"]
        assert (body["model"], body["choices"][0]["text"]) == (name, expected[name])


def test_a_server_of_several_models_has_the_adapters_of_each(
    folders: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    model = {
        "name": "sums", "task": "generate",
        "engine_options": {"adapters": folders, "dtype": "float32", "max_tokens": 6},
    }  # fmt: skip
    other = {"name": "small", "task": "embed", "engine": "headrace.testing:FakeEngine"}
    with serving(tmp_path, json.dumps({"models": [model, other]})) as client:
        listed = {one["id"]: one.get("parent") for one in client.get("/v1/models").json()["data"]}
        assert listed == {"sums": None, "support": "sums", "legal": "sums", "small": None}
        told = client.post("/v1/completions", json={"model": "legal", "prompt": PROMPT}).json()
        assert (told["model"], told["choices"][0]["text"]) == ("legal", expected["legal"])
    doubled = json.dumps({"models": [model, {**other, "name": "support"}]})
    words = "model 'support': the name 'support', of an adapter, is given twice"
    with pytest.raises(ConfigError, match=words), serving(tmp_path, doubled):
        pass


@pytest.mark.parametrize(
    ("name", "words"), [("arithmetic", "which is the model's"), ("", "cannot give"), ("*", "cannot give")]
)
def test_an_adapter_without_a_name_of_its_own_is_refused(folders: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words), running(settings({name: folders["legal"]})):
        pass
