"""`headrace serve --engine vllm`, called by OpenAI's own client at its defaults."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tests.acceptance.serving.process import server
from tests.integration.vllm.conftest import FLAGS

Served = tuple[subprocess.Popen[str], openai.OpenAI]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--task", "generate", "--engine", "vllm", "--model", str(model), "--max-tokens", "24", *FLAGS)
    with (
        server(*flags, folder=tmp_path_factory.mktemp("server")) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield process, client


def answer(client: openai.OpenAI, number: int) -> str:
    name = client.models.list().data[0].id
    done = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": f"question {number}"}], temperature=0
    )
    assert done.usage is not None
    assert done.usage.completion_tokens <= 24
    return done.choices[0].message.content or ""


def test_callers_together_get_the_answers_of_callers_alone(served: Served) -> None:
    _, client = served
    alone = [answer(client, number) for number in range(6)]
    with ThreadPoolExecutor(12) as callers:
        together = list(callers.map(lambda number: answer(client, number % 6), range(24)))
    assert together == alone * 4
    assert len(set(alone)) > 1


def test_a_streamed_answer_is_the_whole_answer(served: Served) -> None:
    _, client = served
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "question 3"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer(client, 3)
    assert chunks[-1].usage is not None


def test_a_stream_that_is_left_does_not_hold_its_slot(served: Served) -> None:
    _, client = served
    name = client.models.list().data[0].id
    for _ in range(12):  # three times as many as there are slots
        stream = client.completions.create(
            model=name, prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    assert answer(client, 1) == answer(client, 1)


def test_what_the_engine_cannot_do_is_refused_by_name(served: Served) -> None:
    _, client = served
    name = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hello"}], reasoning_effort="high"
        )


def test_a_signal_lets_a_streamed_answer_end(served: Served) -> None:
    process, client = served
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="hello",
        max_tokens=300,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    last = list(stream)[-1]
    assert last.usage is not None
    assert last.usage.completion_tokens == 300
    assert process.wait(60) == 0
