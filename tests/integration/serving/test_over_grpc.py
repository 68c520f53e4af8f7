"""The Open Inference Protocol over gRPC, by Triton's own client."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.serving.http.over_grpc import Calls
from headrace.serving.limits import KeySettings, ServeLimits
from headrace.testing import FakeEngine

triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.grpc import service_pb2 as messages  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

ENGINES = "tests.integration.serving.engines"
KEY = {"authorization": "Bearer secret-key-of-tests"}


def served(task: str, engine: str, **more: Any) -> Any:
    return running(ServerSettings(EngineConfig(task, engine=engine), name="org/m", **more), grpc=True)


@pytest.fixture(scope="module")
def embed() -> Iterator[Running]:
    with served(
        "embed",
        "headrace.testing:FakeEngine",
        keys=[KeySettings("tests", hashlib.sha256(b"secret-key-of-tests").digest())],
        limits=ServeLimits(max_body_bytes=100_000),
    ) as server:
        yield server


@pytest.fixture
def client(embed: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(embed.grpc) as found:
        yield found


def texts(*given: str) -> Any:
    tensor = triton.InferInput("text", [len(given)], "BYTES")
    tensor.set_data_from_numpy(np.array(given, dtype=object))
    return tensor


def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as found:
        call()
    return found.value.status(), found.value.message()


def test_the_server_and_its_models_are_described(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata(KEY).name == "headrace"
    assert client.is_model_ready("org/m", headers=KEY)
    [output] = client.get_model_metadata("org/m", headers=KEY).outputs
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [-1, -1])


def test_tensors_go_in_and_come_out(client: Any, embed: Running) -> None:
    answer = client.infer("org/m", [texts("a b", "ç")], request_id="7", headers=KEY, model_version="1")
    assert answer.get_response().id == "7"
    vectors = answer.as_numpy("embedding")
    np.testing.assert_allclose(vectors[0], FakeEngine().vector("a b"), rtol=1e-5)
    named = client.infer("org/m", [texts("a b")], outputs=[triton.InferRequestedOutput("embedding")], headers=KEY)
    np.testing.assert_array_equal(named.as_numpy("embedding")[0], vectors[0])
    contents = messages.InferTensorContents(bytes_contents=[b"a b"])
    given = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1], contents=contents)
    plain = client._client_stub.ModelInfer(
        messages.ModelInferRequest(model_name="org/m", inputs=[given]), metadata=tuple(KEY.items())
    )
    assert plain.raw_output_contents[0] == vectors[0].astype("<f4").tobytes()


def test_errors_have_the_status_of_grpc(client: Any) -> None:
    number = triton.InferInput("text", [1], "FP32")
    number.set_data_from_numpy(np.zeros(1, np.float32))
    wrong_shape = texts("a")
    wrong_shape.set_shape([2])
    other = [triton.InferRequestedOutput("other")]
    classified = [triton.InferRequestedOutput("embedding", class_count=3)]

    def asks(**more: Any) -> Any:
        return client.infer("org/m", [texts("a")], headers=KEY, **more)

    asked = [
        ("UNAUTHENTICATED", "key", lambda: client.infer("org/m", [texts("a")])),
        ("NOT_FOUND", "'none'", lambda: client.infer("none", [texts("a")], headers=KEY)),
        ("NOT_FOUND", "version", lambda: client.infer("org/m", [texts("a")], "9", headers=KEY)),
        ("INVALID_ARGUMENT", "inputs.0.datatype", lambda: client.infer("org/m", [number], headers=KEY)),
        ("INVALID_ARGUMENT", "inputs.0.shape", lambda: client.infer("org/m", [wrong_shape], headers=KEY)),
        ("INVALID_ARGUMENT", "'other'", lambda: asks(outputs=other)),
        ("INVALID_ARGUMENT", "classification", lambda: asks(outputs=classified)),
        ("INVALID_ARGUMENT", "colour", lambda: asks(parameters={"colour": 1})),
        ("RESOURCE_EXHAUSTED", "larger than max", lambda: client.infer("org/m", [texts("a" * 200_000)], headers=KEY)),
        ("UNIMPLEMENTED", "", lambda: client.get_model_config("org/m", headers=KEY)),
    ]  # fmt: skip
    for status, named, call in asked:
        found, message = refusal(call)
        assert (found, named in message) == (f"StatusCode.{status}", True), (found, message)


def test_a_stream_answers_in_order_and_goes_on_after_an_error(client: Any) -> None:
    found: Queue[Any] = Queue()
    client.start_stream(lambda result, error: found.put(error or result.get_response().id), headers=KEY)
    client.async_stream_infer("org/m", [texts("a")], request_id="0")
    assert found.get(timeout=30) == "0"  # before the next is asked
    for number, model in enumerate(("org/m", "none", "org/m"), 1):
        client.async_stream_infer(model, [texts("a")], request_id=str(number))
    first, refused, last = (found.get(timeout=30) for _ in range(3))
    client.stop_stream()
    assert (first, last) == ("1", "3")
    assert "'none'" in refused.message()


@pytest.mark.timeout(20)
def test_a_stream_that_breaks_ends_its_answers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": "busy"}'})

    async def requests() -> AsyncIterator[Any]:
        yield messages.ModelInferRequest(model_name="m")
        raise ConnectionResetError("the client is gone")

    async def main() -> int:
        context = Mock(time_remaining=lambda: None, invocation_metadata=lambda: (), peer=lambda: "ipv4:127.0.0.1:5")
        answers = Calls(app).stream(requests(), context)
        assert (await anext(answers)).error_message == "busy"
        with pytest.raises(ConnectionResetError):
            await anext(answers)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1


def test_a_call_ends_at_its_deadline_or_when_the_client_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served("embed", f"{ENGINES}:Gated") as server, triton.InferenceServerClient(server.grpc) as client:
        status, _ = refusal(lambda: client.infer("org/m", [texts("a")], client_timeout=0.3))
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        call = client.async_infer("org/m", [texts("b")], lambda result, error: None)
        until(lambda: server.host.in_progress == 1)
        call.cancel()
        until(lambda: server.host.in_progress == 0)
        Path("go").touch()
