"""A loaded model: calls, streams and jobs on one engine and one batcher; jobs in the background."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import headrace
from headrace.cluster.ray.data import Stage
from headrace.errors import ConfigError, EngineDeadError, JobError, RecordError, UnknownOptionError

TEXTS = [f"text {number}" for number in range(300)]


class Lengths:
    """Counts characters; refuses "bad", notes its batches, and waits at `gate` if it is closed."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, texts: list[str]) -> list[object]:
        self.gate.wait(60)
        self.batches.append(texts)
        self.threads.add(threading.get_ident())
        return [RecordError("it is bad") if text == "bad" else len(text) for text in texts]


@pytest.fixture
def engine() -> Lengths:
    return Lengths()


@pytest.fixture
def model(engine: Lengths) -> Iterator[headrace.LoadedModel]:
    with headrace.load(engine=engine) as model:
        yield model
        engine.gate.set()


def test_one_input_gives_an_output_and_a_list_gives_a_list(model: headrace.LoadedModel) -> None:
    assert model("four") == 4
    assert model(["a", "bb", "ccc"]) == [1, 2, 3]
    assert model([]) == []
    assert [type(one).__name__ for one in model(["a", "bad"], return_exceptions=True)] == ["int", "RecordError"]
    with pytest.raises(RecordError, match="it is bad"):
        model(["a", "bad"])


def test_a_job_has_the_same_rows_as_one_that_loads_the_model(model: headrace.LoadedModel, tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "text": text, "title": text[:3]} for number, text in enumerate([*TEXTS, "bad"])]
    wanted = headrace.run(rows, engine=Lengths(), sink="list", keep_columns=["title"], progress=False)
    assert model.run(rows, sink="list", keep_columns=["title"]) == wanted
    report = model.run(rows, sink=tmp_path / "out.jsonl")
    assert (report.ok, report.failed) == (300, 1)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 300
    assert model.run(rows, sink=tmp_path / "out.jsonl").ok == 0, "it is finished"


def test_jobs_and_calls_at_the_same_time_share_one_thread_of_the_engine(
    model: headrace.LoadedModel, engine: Lengths
) -> None:
    async def all_at_once() -> list[Any]:
        jobs = [model.arun(TEXTS, sink="list") for _ in range(3)]
        return [await job for job in jobs] + list(await asyncio.gather(*map(model.submit, TEXTS)))

    (*lists,) = asyncio.run(all_at_once())
    assert [len(rows) for rows in lists[:3]] == [300] * 3
    assert lists[3:] == list(map(len, TEXTS))
    assert len(engine.threads) == 1


def test_a_stream_gives_rows_in_order_and_reads_a_limited_number_ahead(
    model: headrace.LoadedModel, engine: Lengths
) -> None:
    read: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(50_000):
            read.append(number)
            yield {"id": number, "text": "bad" if number == 2 else "x" * (number % 7)}

    stream = iter(model.stream(rows))
    found = [next(stream) for _ in range(5)]
    assert found[:2] == [{"id": 0, "output": 0}, {"id": 1, "output": 1}]
    assert found[2] == {"id": 2, "error": {"reason": "RecordError", "message": "it is bad"}}
    assert [row["id"] for row in found] == [0, 1, 2, 3, 4]
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert len(read) < 20_000
    some = {row["id"] for row in model.stream(TEXTS, ordered=False)}
    assert some == set(range(300))


def test_a_stream_can_be_read_in_an_event_loop(model: headrace.LoadedModel) -> None:
    async def ids() -> list[int]:
        return [row["id"] async for row in model.stream(TEXTS)]

    assert asyncio.run(ids()) == list(range(300))


def test_a_job_in_the_background_tells_its_progress_and_can_be_cancelled(
    model: headrace.LoadedModel, engine: Lengths, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    rows = [{"id": number, "text": f"text {number}"} for number in range(5_000)]
    engine.gate.clear()
    job = model.arun(rows, sink=out)
    assert job.progress.ok == 0
    assert not job.is_done
    job.cancel()
    engine.gate.set()
    with pytest.raises(JobError, match=r"cancelled.*run it again to continue"):
        job.result(timeout=60)
    report = model.run(rows, sink=out)
    assert report.ok + report.skipped == 5_000
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == list(range(5_000))


def test_the_job_of_a_cancelled_task_ends(tmp_path: Path) -> None:
    engine = Lengths()
    engine.gate.clear()

    async def cancelled() -> headrace.RunningJob[Any]:
        job = headrace.arun(TEXTS, engine=engine, sink=tmp_path / "out.jsonl")
        task = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return job

    job = asyncio.run(cancelled())
    engine.gate.set()
    with pytest.raises(JobError, match="cancelled"):
        job.result(timeout=60)


def test_a_model_serves_requests_beside_its_other_work(model: headrace.LoadedModel) -> None:
    with TestClient(model.app(name="lengths")) as client:
        job = model.arun(TEXTS, sink="list")
        answer = client.post("/generate", json={"prompts": ["one", "three"]})
        assert answer.json()["results"] == [3, 5]
        assert client.post("/generate", json={"prompts": ["bad"]}).status_code == 400
        assert client.get("/v1/models").json()["data"][0]["id"] == "lengths"
        assert len(job.result(timeout=60)) == 300
    assert model("four") == 4, "it stays loaded"
    with pytest.raises(UnknownOptionError, match="state"):
        model.app(state="folder")  # type: ignore[call-arg]


def test_what_blocks_is_refused_on_an_event_loop(model: headrace.LoadedModel) -> None:
    async def here(call: Any) -> None:
        with pytest.raises(ConfigError, match=r"submit|async for|await"):
            call()

    for call in (lambda: model("a"), lambda: model.run(["a"], sink="list"), lambda: next(iter(model.stream(["a"])))):
        asyncio.run(here(call))


def test_a_setting_of_the_model_is_refused_by_name_in_a_job(model: headrace.LoadedModel) -> None:
    with pytest.raises(UnknownOptionError, match="batch_size"):
        model.run(["a"], sink="list", batch_size=3)  # type: ignore[call-overload]


def test_a_closed_model_says_so(engine: Lengths) -> None:
    model = headrace.load(engine=engine)
    model.close()
    model.close()
    for call in (lambda: model("a"), lambda: model.run(["a"], sink="list"), lambda: list(model.stream(["a"]))):
        with pytest.raises(EngineDeadError, match=r"headrace\.load"):
            call()


def test_an_engine_that_fails_in_a_job_does_not_end_the_model() -> None:
    def sometimes(texts: Sequence[str]) -> list[int]:
        if "boom" in texts:
            raise ValueError("no")
        return [len(text) for text in texts]

    with headrace.load(engine=sometimes) as model:
        rows = model.run(["a", "boom", "bb"], sink="list", max_error_rate=1.0)
        assert [row.get("output") for row in rows] == [1, None, 2]
        assert model("four") == 4


def test_a_stage_of_ray_data_is_such_a_model() -> None:
    async def rows() -> list[Any]:
        stage = Stage(engine=f"{__name__}:Lengths", column="text")
        return [part async for part in stage({"text": ["a", "bad"]})]

    [part] = asyncio.run(rows())
    assert part["output"] == [1, None]
    assert part["error"] == [None, "RecordError: it is bad"]
