"""One configuration of an engine at every door: what is refused, and in which words."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app
from headrace.engines.choosing.config import EngineConfig, merged_options
from headrace.errors import ConfigError, UnknownOptionError
from headrace.jobs.settings import JobSettings, as_json, from_json


def by_run(task: str, options: dict[str, Any]) -> None:
    headrace.run(["a"], sink=print, task=task, progress=False, **options)


def by_server(task: str, options: dict[str, Any]) -> None:
    from headrace.app.servers.server import build_app

    build_app(task, **options)


def by_ray_data(task: str, options: dict[str, Any]) -> None:
    from headrace.cluster.ray.data import Stage

    Stage(task, **options)


ROOT = Path(__file__).parents[3]
DOORS = (by_run, by_server, by_ray_data)


def test_a_misspelt_setting_beside_an_engine_of_your_own_is_named() -> None:
    with pytest.raises(
        UnknownOptionError, match=r"keep_column: .* has no such option; known: batch_size; did you mean keep_columns"
    ):
        headrace.run([{"text": "a"}], sink="list", engine=list, keep_column=["text"], progress=False)


@pytest.mark.parametrize("flag", ["-i", "-o", "--keep-columns", "--limit"])
def test_a_flag_of_the_input_or_output_given_twice_is_refused(flag: str, tmp_path: Path) -> None:
    status, output = flags("run", flag, "1", flag, "2", folder=tmp_path)
    assert (status, f"{flag} is given twice; give it once" in output) == (2, True), output


def flags(command: str, *more: str, folder: Path) -> tuple[int, str]:
    source = folder / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    files = ("-i", str(source), "-o", str(folder / "out.jsonl")) if command == "run" else ()
    ended = CliRunner().invoke(app, [command, *files, *more], env={"COLUMNS": "300"})
    return ended.exit_code, ended.output


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "embed",
            {"truncat_dim": 3},
            "truncat_dim: task 'embed' has no such option; known: .*did you mean truncate_dim",
        ),
        ("embed", {"batch_sizee": 3}, "batch_sizee: task 'embed' has no such option; known: .*did you mean batch_size"),
        (
            "embed",
            {"tensor_parallel_size": 2},
            r"tensor_parallel_size: .* has no such option; .*option of engine 'vllm' \(task 'embed'\) and",
        ),
        (
            "generate",
            {"engine": "static", "kv_cache_tokens": 5},
            r"kv_cache_tokens: .* has no such option; .*is an option of engine 'torch' \(task 'generate'\)",
        ),
        ("embed", {"device": "cpu", "engine_options": {"device": "cuda"}}, "device is given twice; give it once"),
        ("embed", {"batch_tokens": 0}, "batch_tokens is 0; it must be >= 1"),
        ("embed", {"engine": "onyx"}, "task 'embed' has no engine 'onyx'; known: torch, onnx, vllm, endpoint"),
        ("embedd", {}, "unknown task 'embedd'; known: .*; did you mean embed"),
    ],
)
def test_every_door_refuses_it_in_the_same_words(
    door: Callable[[str, dict[str, Any]], None], task: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        door(task, options)


@pytest.mark.parametrize("command", [("run",), ("serve",), ("serve", "--on", "ray")])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--truncat-dim", "3"), "--truncat-dim: task 'embed' has no such option; known: --"),
        (("--truncat-dim", "3"), "did you mean --truncate-dim?"),
        (("--batch_sizee", "3"), "did you mean --batch-size?"),
        (
            ("--tensor-parallel-size", "2"),
            "--tensor-parallel-size is an option of engine 'vllm' (task 'embed') and engine 'torch' (task 'generate')",
        ),
        (("--device", "cpu", "--device", "cuda"), "--device is given twice; give it once"),
        (("--task", "generate", "--seed", "1", "--seed", "2"), "--seed is given twice; give it once"),
        (
            ("--task", "generate", "--stop", "a", "--stop", "the"),
            """--stop is given twice; give it once, as a list in JSON, such as '["a", "b"]'""",
        ),
        (("--task", "zero-shot", "--labels", "a", "--labels", "b"), "--labels is given twice; give it once, as a,b"),
        (("stray",), "unexpected argument 'stray': flags begin with --"),
        (("--labels", "a,b"), "--labels: task 'embed' has no such option"),
        (("--endpoint", "http://a", "--engine", "onnx"), "--endpoint is an option of engine 'endpoint' (task 'embed')"),
    ],
)
def test_every_command_refuses_it_in_the_same_words(
    command: tuple[str, ...], arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    status, output = flags(*command, *arguments, folder=tmp_path)
    assert status == 2
    assert message in " ".join(output.replace("│", " ").split()), output


def test_nothing_heavy_is_imported_for_a_refusal(tmp_path: Path) -> None:
    code = (
        "import sys, headrace.cli.app as cli\n"
        "sys.argv = ['headrace', 'serve', '--truncat-dim', '3']\n"
        "try: cli.app()\n"
        "except SystemExit as end: print(end.code)\n"
        "print(sorted({'torch', 'transformers', 'ray', 'fastapi', 'vllm'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ended.stdout.split("\n")[:2] == ["2", "[]"]


@pytest.mark.parametrize("command", ["run", "serve", "retry"])
def test_the_flags_of_an_engine_are_one_group_of_the_help(command: str) -> None:
    help_text = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200"}).output
    group = help_text.split("─ Engine ─")[1].split("╰─")[0]
    for flag in ("task", "model", "engine", "handler", "endpoint", "batch-tokens", "batch-size", "max-model-len"):
        assert f"--{flag} " in group
    for flag in ("on-too-long", "device", "dtype", "truncate-dim", "labels", "engine-process", "engine-timeout"):
        assert f"--{flag} " in group


def test_an_option_names_its_engine_and_an_engine_its_task() -> None:
    assert EngineConfig().resolved().task == "embed"
    assert EngineConfig().resolved("generate").task == "generate"
    assert EngineConfig(engine=len).resolved().task == "custom"
    assert EngineConfig(engine="my_module:function").resolved().task == "custom"
    assert EngineConfig("embed", engine="my_module:function").resolved().task == "embed"
    assert EngineConfig(engine="my_module:function").resolved("generate").task == "generate"
    assert EngineConfig(engine="onnx").resolved().task == "embed"
    handler = EngineConfig(engine_options={"handler": "h.py"}).resolved()
    assert (handler.engine, handler.task) == ("torchserve", "custom")
    assert EngineConfig("embed", engine_options={"endpoints": ["http://a"]}).resolved().engine == "endpoint"


@pytest.mark.parametrize("script", ["engine_options", "setting_keywords"])
def test_the_typed_keywords_are_those_that_are_declared(script: str, tmp_path: Path) -> None:
    made = importlib.import_module(f"scripts.{script}")
    (tmp_path / "keywords.py").write_text(made.source())
    ruff = [sys.executable, "-m", "ruff", "format", "--config", str(ROOT / "pyproject.toml")]
    subprocess.run([*ruff, str(tmp_path / "keywords.py")], check=True, capture_output=True)
    assert (tmp_path / "keywords.py").read_text() == made.FILE.read_text()


def test_a_job_s_settings_are_kept_in_one_level_and_come_back(tmp_path: Path) -> None:
    config = EngineConfig("embed", None, "onnx", {"max_model_len": 8}, batch_size=4, engine_timeout_s=2.0)
    (tmp_path / "in.jsonl").touch()
    settings = JobSettings(tmp_path / "in.jsonl", "out.jsonl", config, keep_columns=("id",))
    kept = as_json(settings)
    assert kept is not None
    assert "config" not in kept
    assert {field.name for field in fields(EngineConfig)} <= kept.keys()
    assert from_json(kept, "out.jsonl", settings.limits, ignore_changes=False).config == config
    kept.pop("engine_timeout_s")  # a job of before there was one
    assert from_json(kept, "out.jsonl", settings.limits, ignore_changes=False).config.engine_timeout_s is None


def test_the_error_arrives_from_another_process_as_it_was() -> None:
    error = UnknownOptionError("batch", "a", "b", ("batches",), (("c", "d"),), ("batch_size",))
    again = pickle.loads(pickle.dumps(error))
    assert (again.option, again.task, again.engine) == ("batch", "a", "b")
    assert (
        str(again)
        == str(error)
        == (
            "batch: task 'a' has no such option; known: batches; batch is an option of engine 'c' (task 'd'); "
            "did you mean batches?"
        )
    )


def test_options_in_both_ways_are_together_unless_one_is_there_twice() -> None:
    assert merged_options({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="a is given twice"):
        merged_options({"a": 1}, {"a": 1})


def test_the_class_of_an_engine_is_not_taken_for_an_object_of_it() -> None:
    with pytest.raises(ConfigError, match=r"engine is the class Embedding; it must be an object of it: Embedding\(\)"):
        headrace.run(["a"], sink="list", engine=headrace.Embedding, progress=False)


@pytest.mark.parametrize(
    "given", [str.upper, headrace.Embedding(), headrace.Embedding], ids=["function", "engine", "class"]
)
def test_an_engine_in_the_place_of_the_model_is_told_where_it_goes(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"model is .+; it must be a text: a function or an engine goes to engine"):
        headrace.run(["a"], given, sink="list", progress=False)
    with pytest.raises(ConfigError, match=r"a function or an engine goes to engine"):
        headrace.build_app(model=given)


def test_a_server_is_named_after_the_model_of_its_engine() -> None:
    from headrace.engines.choosing.registry import default_model

    assert default_model("embed", None) == "all-MiniLM-L6-v2"
    assert default_model("embed", "onnx") is None
    assert default_model("embed", "headrace.testing:FakeEngine") == "all-MiniLM-L6-v2"
    assert default_model("generate", "endpoint") == "arithmetic"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_options": 4}, "engine_options is 4; it must be a mapping"),
        ({"engine_options": {3: 4}}, "engine_options"),
        ({"limits": headrace.Limits()}, "limits is .*; it must be a ServeLimits"),
        ({"name": 3}, "name is 3"),
        ({"allowed_hosts": "abc"}, "allowed_hosts and keys must be lists"),
        ({"latency_target_s": 0}, "latency_target_s is 0"),
        ({"engine": headrace.Embedding(), "max_wait": 4}, "max_wait is unknown"),
    ],
)
def test_a_server_refuses_what_a_setting_cannot_be(options: dict[str, Any], message: str) -> None:
    from headrace.app.servers.server import build_app

    with pytest.raises(ConfigError, match=message):
        build_app(**{"engine": "headrace.testing:FakeEngine", **options})


@pytest.mark.parametrize(
    ("devices", "installed", "given", "engine"),
    [
        (1, True, {}, "vllm"),
        (1, True, {"engine_options": {"temperature": 0.0}}, "vllm"),
        (0, True, {}, None),
        (1, False, {}, None),
        (1, True, {"engine": "torch"}, "torch"),
        (1, True, {"engine_options": {"kv_cache_tokens": 4096}}, None),  # vLLM has no such option
        (1, True, {"task": "embed"}, None),
    ],
)
def test_vllm_is_the_default_of_generate_on_a_gpu_and_says_so(
    devices: int,
    installed: bool,
    given: dict[str, Any],
    engine: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from headrace.engines.choosing import registry
    from headrace.engines.vllm import options

    monkeypatch.setattr(registry, "cuda_devices", lambda: devices)
    found = importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(PathFinder, "find_spec", lambda name, *rest: found)
    monkeypatch.setattr(options, "vllm_arguments", lambda: () if installed else None)
    config = EngineConfig(**{"task": "generate", **given}).resolved()
    assert config.engine == engine
    assert ("runs on vllm" in caplog.text) == (engine == "vllm")
    assert config.resolved() == config
