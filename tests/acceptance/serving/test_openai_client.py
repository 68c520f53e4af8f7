"""OpenAI's own client and curl against a running server."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.acceptance.command import FAKE, headrace, lines_of
from tests.acceptance.serving.process import server
from tests.acceptance.serving.requests import ended

TALK = ("--task", "generate", "--engine", "tests.integration.serving.engines:Talker", "--state-dir", "state")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(*TALK, folder=tmp_path_factory.mktemp("talker")) as (_, url):
        yield url


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real default model, for which no numbers or budgets are tried."""
    chosen = ("--dtype", "float32", "--batch-tokens", "2048")
    with server(*chosen, folder=tmp_path_factory.mktemp("embedder")) as (_, url):
        yield url


_clients: dict[str, openai.OpenAI] = {}


@pytest.fixture(autouse=True, scope="module")
def closed_clients() -> Iterator[None]:
    yield
    for used in _clients.values():
        used.close()


def client(url: str) -> openai.OpenAI:
    if url not in _clients:
        _clients[url] = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return _clients[url]


def test_completions(talker: str) -> None:
    answer = client(talker).completions.create(model="arithmetic", prompt="say it again", max_tokens=10)
    assert answer.choices[0].text == "say it again"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_chats_whole_and_streamed(talker: str) -> None:
    chat = client(talker).chat.completions
    messages = [{"role": "user", "content": "one two three"}]
    assert chat.create(model="arithmetic", messages=messages).choices[0].message.content == "one two three"
    stream = chat.create(model="arithmetic", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == "one two three"
    assert len([piece for piece in pieces if piece]) >= 2


def test_a_conversation_as_clients_keep_it(talker: str) -> None:
    """Text parts, the answer handed back as it came, and all that the client may say without meaning anything."""
    chat = client(talker).chat.completions
    said = chat.create(model="arithmetic", messages=[{"role": "user", "content": [{"type": "text", "text": "one"}]}])
    raw = chat.with_raw_response.create(
        model="arithmetic",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "one"},
            said.choices[0].message,
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
        ],
        n=1,
        logprobs=False,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        seed=3,
        max_completion_tokens=50,
        extra_headers={"X-Request-ID": "mine"},
    )
    assert raw.request_id == "mine"
    assert raw.parse().choices[0].message.content == "two three"


@pytest.mark.parametrize("field", [{"store": True}, {"logprobs": True}, {"modalities": ["audio"]}])
def test_what_cannot_be_obeyed_is_told_to_the_client(talker: str, field: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(talker).chat.completions.create(  # type: ignore[call-overload]
            model="arithmetic", messages=[{"role": "user", "content": "x"}], **field
        )
    assert [caught.value.param] == list(field)
    assert caught.value.request_id is not None
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client(talker).chat.completions.create(
            model="arithmetic",
            messages=[{"role": "user", "content": picture}],  # type: ignore[list-item,misc]
        )


def test_models_and_errors_as_the_client_knows_them(talker: str) -> None:
    names = [model.id for model in client(talker).models.list()]
    assert len(names) == 1
    with pytest.raises(openai.NotFoundError, match=names[0]):
        client(talker).completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client(talker).completions.create(model=names[0], prompt="")
    assert caught.value.code == "empty"


def test_embeddings_of_the_real_model(embedder: str) -> None:
    texts = ["a cat sits on the mat", "a kitten rests on a rug", "stock prices fell"]
    data = client(embedder).embeddings.create(model="all-MiniLM-L6-v2", input=texts).data
    cat, kitten, stocks = (entry.embedding for entry in data)

    def likeness(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert len(cat) == 384
    with pytest.raises(openai.BadRequestError) as caught:
        client(embedder).embeddings.create(model="all-MiniLM-L6-v2", input=texts, dimensions=64)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="256 tokens"):
        client(embedder).embeddings.create(
            model="all-MiniLM-L6-v2", input="word " * 900, extra_body={"truncate": False}
        )
    cut = client(embedder).embeddings.with_raw_response.create(model="all-MiniLM-L6-v2", input="word " * 900)
    assert cut.headers["x-truncated-inputs"] == "1"
    assert cut.parse().usage.prompt_tokens == 256
    assert likeness(cat, cat) == pytest.approx(1, abs=1e-5)
    assert likeness(cat, kitten) > 0.5 > likeness(cat, stocks)


def test_files_and_batches(talker: str, tmp_path: Path) -> None:
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": f"say {n}"}}
        for n in range(20)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = client(talker)
    file = here.files.create(file=tmp_path / "in.jsonl", purpose="batch")
    batch = here.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    done = ended(here, batch.id)
    assert done.output_file_id is not None
    answers = [json.loads(row) for row in here.files.content(done.output_file_id).text.splitlines()]
    assert [row["response"]["body"]["choices"][0]["text"] for row in answers] == [f"say {n}" for n in range(20)]
    assert batch.id in [other.id for other in here.batches.list()]
    assert here.files.delete(file.id).deleted


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(embedder: str) -> None:
    command = ["curl", "-s", f"{embedder}/v1/embeddings", "-H", "Content-Type: application/json"]
    command += ["-d", '{"input": ["a text", "another"]}']
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [len(entry["embedding"]) for entry in answer["data"]] == [384, 384]


def test_sigterm_ends_with_status_0_and_a_dead_engine_with_1(tmp_path: Path) -> None:
    with server("--task", "embed", "--engine", "tests.integration.serving.engines:Mortal", folder=tmp_path) as (
        process,
        url,
    ):
        with pytest.raises(openai.InternalServerError):
            client(url).embeddings.create(model="all-MiniLM-L6-v2", input="die")
        assert process.wait(60) == 1
    with server("--task", "embed", "--engine", "tests.integration.serving.engines:Mortal", folder=tmp_path) as (
        process,
        url,
    ):
        with pytest.raises(openai.NotFoundError):
            client(url).embeddings.create(model="nope", input="die")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    status, said = headrace("serve", "--model", "no/such/folder", folder=tmp_path)
    assert status == 2
    assert "no/such/folder" in said
    assert said.count("\n") <= 2


@pytest.mark.parametrize("flags", [("--port", "{taken}"), ("--host", "192.0.2.77"), ("--state-dir", "a-file")])
def test_what_cannot_be_had_is_told_in_one_line(tmp_path: Path, flags: tuple[str, str]) -> None:
    (tmp_path / "a-file").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        value = flags[1].format(taken=other.getsockname()[1])
        status, said = headrace("serve", "--port", "0", *FAKE, flags[0], value, folder=tmp_path)
    assert status == 2
    assert value in said
    assert len(lines_of(said)) == 1
