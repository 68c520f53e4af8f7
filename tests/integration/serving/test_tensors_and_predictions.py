"""The Open Inference Protocol, TorchServe's predictions and Voyage's rankings."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.serving.running import Running, running
from tests.small_models import encoded, picture, text_model, vision_model

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
INFER = "/v2/models/m/infer"
ROW = np.array(FakeEngine().vector("a b"))


@pytest.fixture(scope="module")
def embed() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("embed", engine="headrace.testing:FakeEngine"), name="m")) as server:
        yield server


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig("generate", engine=f"{ENGINES}:Talker"), name="m")) as server:
        yield server


def tensor(*texts: str, **more: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts), **more}


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def test_tensors_as_json(embed: Running, talker: Running) -> None:
    found = embed.post(INFER, {"id": "7", "inputs": [tensor("a b", "c")]}).json()
    assert (found["id"], found["model_name"]) == ("7", "m")
    [output] = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [2, 8])
    np.testing.assert_allclose(output["data"][:8], ROW, rtol=1e-5)
    nested = embed.post(INFER, {"inputs": [tensor(shape=[2, 1], data=[["a b"], ["c"]])]}).json()
    assert nested["outputs"] == found["outputs"]
    said = talker.post(INFER, {"inputs": [tensor("one two three")], "parameters": {"max_tokens": 2}}).json()
    assert said["outputs"] == [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["one two"]}]


def test_binary_tensors(embed: Running) -> None:
    data = packed("a b", "ç")
    described = {"name": "text", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "content-type": "application/octet-stream"}
    response = embed.client.post(INFER, content=head + data, headers=headers)
    size = int(response.headers["inference-header-content-length"])
    [output] = json.loads(response.content[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 64}
    vectors = np.frombuffer(response.content[size:], "<f4").reshape(2, 8)
    np.testing.assert_allclose(vectors[0], ROW, rtol=1e-5)
    for broken in (data[:-1], data + b"\0", b"\xff\xff\xff\xff"):
        refused = embed.client.post(INFER, content=head + broken, headers=headers)
        assert refused.status_code == 400
        assert "inputs" in refused.json()["error"]
    web_page = {**headers, "origin": "http://evil.example"}
    assert embed.client.post(INFER, content=head + data, headers=web_page).status_code == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor("a", shape=[2])]}, "inputs.0.shape"),
        ({"inputs": [tensor("a", shape=[1 << 40, 1 << 40])]}, "inputs.0.shape"),
        ({"inputs": [tensor("a", datatype="FP32")]}, "inputs.0.datatype"),
        ({"inputs": [tensor("a", data=[5])]}, "inputs.0.data"),
        ({"inputs": [tensor("a"), tensor("b")]}, "inputs"),
        ({"inputs": [tensor("a")], "parameters": {"colour": 1}}, "colour"),
        ({"inputs": [tensor("a")], "outputs": [{"name": "other"}]}, "outputs.0.name"),
        ({"inputs": [tensor("a")], "colour": 1}, "colour"),
        ({"inputs": [tensor("a", parameters={"binary_data_size": 9})]}, "binary_data_size"),
    ],
)
def test_a_wrong_tensor_is_named(embed: Running, body: Any, field: str) -> None:
    response = embed.post(INFER, body)
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]


def test_the_model_is_described(embed: Running) -> None:
    assert embed.client.get("/v2").json()["name"] == "headrace"
    found = embed.client.get("/v2/models/m").json()
    assert found["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
    assert embed.client.get("/v2/models/m/versions/1/ready").status_code == 200
    for path in ("/v2/models/other", "/v2/models/m/versions/2/ready"):
        refused = embed.client.get(path)
        assert refused.status_code == 404
        assert isinstance(refused.json()["error"], str)
    metrics = embed.client.get("/metrics").text
    assert 'route="/v2/models/{model:path}"' in metrics
    assert "/v2/models/other" not in metrics


def test_pairs_and_labels(tmp_path: Path) -> None:
    with running(ServerSettings(EngineConfig("score", str(text_model(tmp_path, ("x",)))), name="m")) as server:
        body = {"inputs": [tensor("canal", name="query"), tensor("a mill", "a canal")]}
        [output] = server.post(INFER, body).json()["outputs"]
        refused = server.post(INFER, {"inputs": [tensor("canal"), tensor("a mill", "")]})
        assert refused.json()["error"] == "text 1 of inputs.1 is empty"
        asked = {"text_1": "canal", "text_2": ["a mill", "a canal"]}
        expected = [one["score"] for one in server.post("/v1/score", asked).json()["data"]]
        assert output["data"] == pytest.approx(expected, abs=1e-5)
        assert server.post("/predictions/m", ["canal", "a mill"]).json() == pytest.approx(expected[0], abs=1e-5)
        assert "data" in server.post("/predictions/m", "canal").json()["message"]
        ranked = {"query": "canal", "documents": ["a mill", "a canal"], "model": "m", "top_k": 1, "truncation": True}
        voyage = server.post("/v1/rerank", ranked).json()
        assert (voyage["object"], len(voyage["data"])) == ("list", 1)
    with running(ServerSettings(EngineConfig("classify", engine=f"{ENGINES}:Labels"), name="m")) as server:
        label, score = server.post(INFER, {"inputs": [tensor("a", "b")]}).json()["outputs"]
        assert (label["data"], score["data"]) == (["fine", "fine"], [1.0, 1.0])


def test_predictions_of_any_body(embed: Running, talker: Running) -> None:
    client, form = embed.client, {"content-type": "application/x-www-form-urlencoded"}
    for response in (
        client.post("/predictions/m", content=b"a b"),
        client.post("/predictions/m/1.0", content=b"a b", headers=form),
        client.post("/predictions/m", data={"data": "a b"}),
        client.post("/predictions/m", files={"data": b"a b"}),
        client.post("/predictions/m", json="a b"),
        client.post("/predictions/m", json={"data": "a b"}),
    ):
        assert response.status_code == 200, response.text
        np.testing.assert_allclose(response.json(), ROW, rtol=1e-5)
    chat = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}
    assert talker.post("/predictions/m", chat).json() == "a b"
    for refused, status in (
        (client.post("/predictions/other", content=b"a"), 404),
        (client.post("/predictions/m", content=b"\xff"), 400),
        (client.post("/predictions/m", json={"text": "a"}), 400),
        (client.post("/predictions/m", files={"other": b"a"}), 400),
        (client.post("/predictions/m", content=b""), 400),
    ):
        assert (refused.status_code, refused.json()["code"]) == (status, status)
    web_page = {"origin": "http://evil.example", "content-type": "text/plain"}
    assert client.post("/predictions/m", content=b"a", headers=web_page).status_code == 400


def test_predictions_of_images(tmp_path: Path) -> None:
    config = EngineConfig("image-classify", str(vision_model(tmp_path)))
    with running(ServerSettings(config, name="m")) as server:
        image = encoded(picture())
        found = server.client.post("/predictions/m", content=image).json()
        assert server.client.post("/predictions/m", files={"data": image}).json()["label"] == found["label"]
        assert server.client.post("/predictions/m", content=b"no image").status_code == 400
