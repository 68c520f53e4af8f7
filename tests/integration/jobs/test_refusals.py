"""What a job, or a server, refuses before anything is written, and what it says of a job that was begun otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app
from headrace.cli.report import default_page
from headrace.client import AsyncClient
from headrace.errors import ConfigError, ResumeMismatchError
from headrace.jobs.state.fingerprint import check_same
from headrace.jobs.state.inspection import known_target

FAKE = "headrace.testing:FakeEngine"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n')


def said(command: str, *flags: str) -> str:
    files = ("-i", "in.jsonl", "-o", "out.jsonl") if command == "run" else ()
    ended = CliRunner().invoke(app, [command, *files, *flags], env={"COLUMNS": "300"})
    assert ended.exit_code == 2, ended.output
    assert not Path("out.jsonl").exists()
    return ended.output


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def repeated(model: str | None = None, times: int = 1, why: object = None) -> Callable[[list[str]], list[str]]:
    return lambda texts: [text * times for text in texts]


def test_a_model_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"model is 'x', and engine .*:lengths' takes no model; leave it out"):
        headrace.run(["a"], "x", sink="list", engine=lengths, progress=False)
    Path("model").mkdir()
    Path("handler.mar").write_bytes(b"")
    assert "--model is 'model', and the archive handler.mar has the model" in said(
        "run", "--handler", "handler.mar", "--model", "model"
    )


def test_a_server_refuses_before_it_says_that_it_loads() -> None:
    for flags, words in (
        (("--min-replicas", "1"), "Invalid value for --on: flags of a cluster need it, as does --min-replicas"),
        (("--engine", FAKE, "--allowed-host", "http://x"), "is not a host name"),
        (("--engine", FAKE, "--api-key-file", "none"), "none"),
        (("--ssl-certfile", "none"), "--ssl-keyfile and --ssl-certfile go together"),
    ):
        found = said("serve", *flags)
        assert words in found
        assert "loading" not in found
    assert "flags of a cluster need it, as does --replicas" in said("run", "--replicas", "2")


def test_what_is_loaded_is_called_a_model_only_where_there_is_a_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli.engine_flags import engine_and_model
    from headrace.engines.choosing.config import EngineConfig

    assert engine_and_model(EngineConfig("embed")) == "the default model"
    assert engine_and_model(EngineConfig("custom", engine=FAKE)) == FAKE
    assert engine_and_model(EngineConfig("custom", engine="torchserve")) == "torchserve"
    monkeypatch.setattr("headrace.engines.text.options.Embedding.default_model", None)
    assert engine_and_model(EngineConfig("embed")) == "the engine"


def job(**given: Any) -> Any:
    return headrace.run("in.jsonl", sink="out.jsonl", progress=False, **given)


def differences(**given: Any) -> str:
    with pytest.raises(ResumeMismatchError) as raised:
        job(**given)
    found = str(raised.value)
    return found.partition("was started with other settings: ")[2].partition(". Restore that")[0]


def test_a_resume_shows_what_the_user_set() -> None:
    job(engine=FAKE, task="embed", dimension=4)
    assert differences(engine=FAKE, task="embed", dimension=5) == "dimension was 4, now 5"
    assert differences(engine=FAKE, dimension=4) == "task was 'embed', now 'custom' (pass task=\"embed\")"
    assert differences(engine=FAKE, task="embed", dimension=4, model="x") == "model was not set, now 'x'"
    Path("in.jsonl").write_text('{"id": 1, "text": "one"}\n')
    assert differences(engine=FAKE, task="embed", dimension=4) == (
        "the content of the input has changed; the input's size in bytes was 50, now 25"
    )


def test_a_fact_that_no_setting_gave_is_told_in_words() -> None:
    with pytest.raises(ResumeMismatchError, match="the engine's dimension was 3, now 4; seed was 1, now 2"):
        check_same("o", {"engine": {"dimension": 3, "engine_seed": 1}}, {"engine": {"dimension": 4, "engine_seed": 2}})


def test_the_options_of_a_factory_are_compared_between_runs() -> None:
    job(engine=repeated, times=2)
    assert differences(engine=repeated, times=3) == "times was 2, now 3"
    assert job(engine=repeated, times=2, why=object()).skipped == 2, "what JSON cannot hold is not compared"
    state = known_target("out.jsonl").work / "job.json"
    kept = json.loads(state.read_text())
    del kept["fingerprint"]["engine"]["given"]  # as earlier versions wrote it
    state.write_text(json.dumps(kept))
    assert job(engine=repeated, times=3).skipped == 2


def test_a_job_in_a_running_loop_is_refused_before_it_starts() -> None:
    async def awaited() -> Any:
        return await job(engine=lengths)

    with pytest.raises(ConfigError, match=r"await headrace\.arun\(\.\.\.\) in place of headrace\.run"):
        asyncio.run(awaited())
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/chat/completions/", "/classify"])
def test_a_route_in_place_of_a_servers_address_is_refused_with_the_address(route: str) -> None:
    base = "http://host:1/v1" if "v1" in route else "http://host:1"
    with pytest.raises(ConfigError, match=f"is one of the server's routes, .*; give its address: {base}$"):
        AsyncClient(f"http://host:1{route}")
    assert f"give its address: {base}" in said("run", "--endpoint", f"http://host:1{route}")


def test_a_page_is_named_after_an_address_without_its_query() -> None:
    assert default_page(["postgresql://host/books?table=a"]) == Path("books.report.html")
    assert default_page(["a?b/out.jsonl"]) == Path("a?b/out.jsonl.report.html"), "a file may be called so"
