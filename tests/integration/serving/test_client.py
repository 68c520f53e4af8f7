"""The client against real servers: order, retries, several endpoints, whole jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

import headrace
from headrace.app.servers.server import ServerSettings
from headrace.client import AsyncClient, Client, ClientSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, EngineDeadError, EngineError, JobError, RecordError
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits
from headrace.testing import FakeEngine

ENGINES = "tests.integration.serving.engines"
PATH = "/v1/embeddings"
# A machine that pauses looks like a loop that is blocked.
pytestmark = pytest.mark.filterwarnings("ignore::headrace.BlockedLoopWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as server:
        yield server


def vector(answer: Any) -> list[float]:
    return list(answer["data"][0]["embedding"])


def texts(count: int) -> list[dict[str, Any]]:
    return [{"input": f"text {number}"} for number in range(count)]


def test_answers_come_in_order(server: Running) -> None:
    with Client(server.url) as client:
        answers = list(client.map(PATH, texts(150)))
    assert [vector(answer) for answer in answers] == [FakeEngine().vector(f"text {n}") for n in range(150)]


def test_leaving_early_leaves_nothing_behind(server: Running) -> None:
    with Client(server.url + "/v1/") as client:
        answers = client.map(PATH, texts(150))
        next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert vector(client.post(PATH, {"input": "again"})) == FakeEngine().vector("again")


def test_a_bad_request_is_its_own(server: Running) -> None:
    with Client(server.url) as client:
        answers = list(client.map(PATH, [{"input": "a"}, {"input": ""}, {"input": "b"}], return_exceptions=True))
        assert isinstance(answers[1], RecordError)
        assert vector(answers[2]) == FakeEngine().vector("b")
        with pytest.raises(RecordError, match="text 0 of input is empty"):
            list(client.map(PATH, [{"input": ""}]))


class Naps:
    """Sleeps no longer than a moment, and remembers how long it was to be."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0.02)


def test_a_full_server_is_asked_again_when_it_says() -> None:
    naps = Naps()
    settings = ServerSettings(
        EngineConfig(task="embed", engine=f"{ENGINES}:Gradual"), limits=ServeLimits(max_requests=2)
    )

    async def main(url: str) -> list[Any]:
        # Its naps take no time, so that it asks again far more often than a client that sleeps.
        patient = ClientSettings(concurrency=16, attempts=1, patience_s=1e9)
        async with AsyncClient(url, settings=patient, sleep=naps, chance=lambda: 0.0) as client:
            return [answer async for answer in client.map(PATH, texts(60))]

    with running(settings) as server:
        answers = asyncio.run(main(server.url))
    assert [vector(answer) for answer in answers] == [FakeEngine().vector(f"text {n}") for n in range(60)]
    assert naps.seconds
    assert min(naps.seconds) >= 1.25  # Retry-After: 1, and half of the first backoff


def test_a_server_that_stays_full_is_given_up_after_a_while() -> None:
    naps = Naps()

    async def main(server: Running) -> None:
        settings = ClientSettings(attempts=2, backoff_s=1, patience_s=5)
        first = asyncio.ensure_future(asyncio.to_thread(server.post, PATH, {"input": "first"}))
        await asyncio.to_thread(until, lambda: server.engine.batch_sizes != [])
        async with AsyncClient(server.url, settings=settings, sleep=naps, chance=lambda: 1.0) as client:
            with pytest.raises(EngineError, match="429"):
                await client.post(PATH, {"input": "second"})
        server.engine.go.set()
        assert (await first).status_code == 200

    with running(
        ServerSettings(EngineConfig(task="embed", engine=f"{ENGINES}:Held"), limits=ServeLimits(max_requests=1))
    ) as server:
        asyncio.run(main(server))
    assert naps.seconds == [2, 2, 2, 2]  # three while it has patience, then the first of two tries


def test_a_server_that_is_gone_is_tried_so_often_and_no_more() -> None:
    naps = Naps()

    async def main() -> None:
        settings = ClientSettings(attempts=4, backoff_s=1, longest_backoff_s=3)
        async with AsyncClient("http://127.0.0.1:1", settings=settings, sleep=naps, chance=lambda: 1.0) as client:
            with pytest.raises(EngineDeadError, match="cannot be reached"):
                await client.post(PATH, {})

    asyncio.run(main())
    assert naps.seconds == [1, 2, 3]


def test_several_endpoints_share_the_work(server: Running) -> None:
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as other:
        before = sum(server.engine.batch_sizes)
        with Client([server.url, other.url]) as client:
            assert len(list(client.map(PATH, texts(120)))) == 120
        shares = sum(server.engine.batch_sizes) - before, sum(other.engine.batch_sizes)
        assert sum(shares) == 120
        assert min(shares) > 24


def test_a_key_is_sent_and_its_refusal_is_final(tmp_path: Path) -> None:
    with running(
        ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), keys=read_keys(None, "k1"))
    ) as server:
        with Client(server.url, api_key="k1") as client:
            assert vector(client.post(PATH, {"input": "x"}))
        with (
            Client(server.url, api_key="k2") as client,
            pytest.raises(
                EngineDeadError,
                match=r"says 401: .*; give the server's key: OPENAI_API_KEY for a job, api_key in Python",
            ),
        ):
            client.post(PATH, {"input": "x"})


@pytest.mark.parametrize("endpoint", [[], "localhost:8000", "ftp://host"])
def test_what_is_no_address_is_refused(endpoint: Any) -> None:
    with pytest.raises(ConfigError):
        AsyncClient(endpoint)


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(count)))
    return path


def test_a_job_over_an_endpoint_gives_what_the_engine_gives_and_resumes(server: Running, tmp_path: Path) -> None:
    source, sink = write(tmp_path / "in.jsonl", 500), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"engine": "endpoint", "attempts": 1, "progress": False}
    with pytest.raises(JobError, match="cannot be reached"):
        headrace.run(source, sink=sink, task="embed", endpoints=["http://127.0.0.1:1"], **options)
    report = headrace.run(source, sink=sink, task="embed", endpoints=[server.url], **options)
    assert report.ok == 500
    rows = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(500))
    assert rows[7]["embedding"] == FakeEngine().vector("text 7")


def test_a_job_of_chats_over_an_endpoint(tmp_path: Path) -> None:
    source, sink = write(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    with running(ServerSettings(EngineConfig(task="generate", engine=f"{ENGINES}:Talker"))) as server:
        headrace.run(source, sink=sink, task="generate", engine="endpoint", endpoints=[server.url], progress=False)
    assert [json.loads(line)["generation"]["text"] for line in sink.read_text().splitlines()] == [
        f"text {n}" for n in range(20)
    ]
