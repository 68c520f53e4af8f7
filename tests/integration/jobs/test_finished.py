"""A finished job is recognised without its engine, whichever that is."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.settings import job_settings

import headrace
from headrace.app.jobs.plan import engine_identity
from headrace.errors import ResumeMismatchError, TooManyErrorsError
from headrace.jobs.state.fingerprint import with_options
from headrace.testing import FakeEngine

HANDLER = "def handle(data, context):\n    return [1] * len(data)\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"t{n}"}) + "\n" for n in range(20)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("model.onnx", "model.safetensors"):
        (folder / name).write_bytes(b"weights")
    (tmp_path / "handler.py").write_text(HANDLER)
    return folder


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each model that is loaded for a job."""
    loaded: list[Any] = []

    def create(task: str, model: Any, **options: Any) -> FakeEngine:
        loaded.append(task)
        return FakeEngine()

    monkeypatch.setattr("headrace.engines.choosing.registry.create", create)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    return loaded


ENGINES: Sequence[tuple[str, dict[str, Any]]] = [
    ("onnx", {"task": "embed", "engine": "onnx"}),
    ("vllm", {"task": "generate", "engine": "vllm", "max_tokens": 4}),
    ("torchserve", {"task": "custom", "engine": "torchserve", "handler": "handler.py"}),
    ("custom", {"task": "custom", "engine": "tests.integration.jobs.own:make"}),
    ("torch", {"task": "embed"}),
]


@pytest.mark.parametrize("settings", [settings for _, settings in ENGINES], ids=[name for name, _ in ENGINES])
def test_no_engine_is_loaded_for_a_finished_job(
    settings: dict[str, Any], rows: Path, model: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.parent)
    run: Callable[[], Any] = lambda: headrace.run(  # noqa: E731 - the same call, several times
        rows, model, sink=rows.parent / "out.jsonl", progress=False, **settings
    )
    run()
    assert len(loads) == 1
    run()
    headrace.run(rows, model, sink=rows.parent / "out.jsonl", progress=False, retry=True, **settings)
    assert len(loads) == 1, "the job is finished, and nothing has failed"
    os.utime(model / "config.json", (1, 1))
    run()
    assert len(loads) == 2, "the model may be another one: only the engine can tell"


def test_new_rows_of_a_finished_job_are_refused_before_its_model_is_loaded(rows: Path, loads: list[Any]) -> None:
    sink = rows.parent / "out.jsonl"

    def run(**more: Any) -> Any:
        return headrace.run(rows, sink=sink, task="embed", progress=False, **more)

    run()
    with rows.open("a") as file:
        file.write(json.dumps({"id": "new", "text": "one more"}) + "\n")
    with pytest.raises(ResumeMismatchError, match=r"started with other settings: .*to start again: a finished") as said:
        run()
    assert "ignore_changes" not in str(said.value)
    with pytest.raises(ResumeMismatchError, match="is finished, and its input has changed since"):
        run(ignore_changes=True)
    assert loads == ["embed"]
    sink.unlink()
    assert run(ignore_changes=True).records == 21, "a removed output is made again"


@pytest.mark.parametrize("as_name", [True, False], ids=["name", "object"])
def test_a_factory_of_ones_own_is_not_called_for_a_finished_job(
    as_name: bool, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mine_own", raising=False)
    (tmp_path / "mine_own.py").write_text(
        "calls = []\n\ndef make(model, depth=1):\n    calls.append(depth)\n    return lambda values: values\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine_own  # type: ignore[import-not-found]

    sink = tmp_path / "out.jsonl"
    engine = "mine_own:make" if as_name else mine_own.make

    def run(source: Any = rows, **options: Any) -> None:
        headrace.run(source, sink=sink, engine=engine, task="custom", progress=False, **options)

    run()
    run()
    assert mine_own.calls == [1]
    run(batch_size=7)
    assert mine_own.calls == [1], "the size of a batch decides no output"
    with pytest.raises(ResumeMismatchError, match="depth was not set, now 2"):
        run(depth=2)
    assert mine_own.calls == [1, 2], "an option may decide it"
    with pytest.raises(ResumeMismatchError):
        run([{"id": 1, "text": "another"}])


def test_an_object_made_already_is_asked_what_it_is(rows: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    settings = job_settings(rows, tmp_path / "out.jsonl", engine=engine)
    assert engine_identity(settings) is None


def flavoured(model: str | None = None, flavour: str = "plain", portion: int = 1) -> FakeEngine:
    """An engine whose options are among its job's facts."""
    LOADED.append((flavour, portion))
    return _Refusing(model)


LOADED: list[tuple[str, int]] = []


class _Refusing(FakeEngine):
    def describe(self) -> dict[str, Any]:
        return {"engine": "flavoured", "given": dict(zip(("flavour", "portion"), LOADED[0], strict=True))}

    def forward(self, batch: list[str]) -> list[list[float]]:
        raise ValueError("bad")


def test_another_option_of_the_engine_is_refused_before_it_is_loaded(rows: Path) -> None:
    LOADED.clear()

    def run(**options: Any) -> Any:
        headrace.run(
            rows, sink=rows.parent / "out.jsonl", engine=f"{__name__}:flavoured", progress=False,
            engine_options=options, max_errors=1,
        )  # fmt: skip

    with pytest.raises(TooManyErrorsError):
        run(flavour="sweet", portion=2)
    for changed, words in (({"flavour": "sour"}, "flavour was 'sweet', now 'sour'"), ({"portion": 1}, "portion was 2")):
        with pytest.raises(ResumeMismatchError, match=words):
            run(**{"flavour": "sweet", "portion": 2, **changed})
    assert LOADED == [("sweet", 2)]


def test_only_an_option_that_is_noted_as_it_is_given_is_sure_before_the_engine_is_loaded() -> None:
    facts = {"max_model_len": 256, "dtype": "float32", "adapter": "1f2e", "sampling": {"top_k": 0, "stop": ["a"]}}

    def changed(then: dict[str, object], now: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in with_options(facts, then, now).items() if value != facts[name]}

    assert changed({}, {"max_model_len": 64}) == {"max_model_len": 64}
    assert changed({}, {"dtype": "bfloat16"}) == {"dtype": "bfloat16"}
    assert changed({"max_model_len": 999}, {"max_model_len": 128}) == {}, "it was lowered"
    for now in ({"max_model_len": 512}, {"dtype": "auto"}, {"top_k": -1}, {"stop": "b"}, {"unknown": 1}):
        assert changed({}, now) == {}
    assert changed({"adapter": "./a"}, {"adapter": "./b"}) == {}, "the same files, perhaps"
