"""Flags of an engine, by its own names."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.app.servers.settings import ServerSettings
from headrace.cli.app import VERBS, app
from headrace.cli.engine_flags import engine_options
from headrace.engines.choosing.registry import options_by_task
from headrace.errors import ConfigError
from headrace.wording import flag_of


def test_a_refused_value_is_named_with_what_the_setting_takes() -> None:
    said = CliRunner().invoke(app, ["run", "-i", "x.jsonl", "-o", "y.jsonl", "--on-nan", "zero"]).output
    assert "--on-nan is 'zero'; it must be one of null, error" in said


def test_serve_hands_flags_that_it_does_not_have_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def serve(settings: ServerSettings, *_: object) -> int:
        given.update(settings.config.engine_options)
        return 0

    monkeypatch.setattr("headrace.cli.serve.serve_one", serve)
    flags = ["--labels", "a,b", "--multi-label", "--max-model-len", "64"]
    assert CliRunner().invoke(app, ["serve", "--task", "zero-shot", *flags]).exit_code == 0
    assert given == {"labels": "a,b", "multi_label": True, "max_model_len": 64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "80"], "--prot: task 'embed' has no such option; known: --device"),
        (["--prot", "80"], "did you mean --prompt or --port?"),
        (["--task", "zero-shot", "--lables", "a"], "did you mean --labels?"),
        (["my-model"], "did you mean --model my-model?"),
    ],
)
def test_serve_tells_flags_that_nobody_has(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["serve", *arguments])
    assert ended.exit_code == 2
    assert message in ended.output


def test_flags_become_options_of_the_type_their_value_has() -> None:
    arguments = [
        *("--max-num-seqs", "64", "--gpu-memory-utilization=0.9", "--dtype", "float32", "--enforce-eager"),
        *(
            "--no-enable-prefix-caching",
            "--compilation-config",
            '{"level": 3}',
            "--seed",
            "-1",
            "--stop",
            '["Q:", "\\n"]',
        ),
    ]
    assert engine_options(arguments) == {
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.9,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "compilation_config": {"level": 3},
        "seed": -1,
        "stop": ["Q:", "\n"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float32", "more"], "unexpected argument 'more'"),
        (["-x"], "unexpected argument '-x'"),
        (["--"], "unexpected argument '--'"),
        (["--seed", "1", "--seed=2"], "--seed=2 is given twice"),
    ],
)
def test_what_is_no_flag_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(arguments)


@pytest.mark.parametrize("command", ["run", "serve", "retry", "tune"])
def test_the_help_lists_every_flag_of_an_engine_once_for_each_task(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "400"}).output
    flags, lines = said.split("docs/engines.md):")[0], said.split("docs/engines.md):")[1]
    for task, engines in options_by_task().items():
        for engine, options in engines.items():
            own = [line for line in lines.splitlines() if {task, f"--engine {engine}"} & set(names_of(line))]
            for option in options:
                flag = flag_of(option)
                assert f"{flag} " in flags or sum(f"{flag} " in f"{line} " for line in own) == 1, (task, engine, flag)
    assert "classify: --top-labels" in lines
    assert "--engine vllm: those of vLLM" in lines


@pytest.mark.parametrize("command", ["run", "serve", "retry", "tune"])
def test_the_usual_help_of_a_command_with_many_flags_is_one_screen(command: str) -> None:
    lines = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    flags = {line.split()[0] for line in lines if line}
    assert {"--task", "--engine", "--help-all"} <= flags
    assert "--engine-timeout" not in flags


@pytest.mark.parametrize(
    ("words", "place", "found"),
    [
        ("headrace re", 1, {"retry", "report"}),
        ("headrace run --text", 2, {"--text-column", "--text-pair-column"}),
        ("headrace run --on-nan ", 3, {"null", "error"}),
    ],
)
def test_shells_complete_commands_flags_and_choices(words: str, place: int, found: set[str]) -> None:
    asked = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    assert set(CliRunner().invoke(app, [], env=asked, prog_name="headrace").output.split()) == found


def names_of(line: str) -> list[str]:
    return line.strip().partition(":")[0].split(", ")


@pytest.mark.parametrize("verb", VERBS)
def test_the_list_of_commands_says_of_each_what_its_own_help_says_first(verb: str) -> None:
    ended = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "300"})
    assert ended.exit_code == 0
    assert VERBS[verb] in " ".join(ended.output.split())
    assert VERBS[verb] in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys, headrace.cli.app as cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: print(sorted(name for name in sys.modules if name.startswith(('headrace.', 'pyarrow'))))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ast.literal_eval(ended.stdout.splitlines()[-1])
    assert {name.split(".")[1] for name in names} == {"cli", "options", "wording"}
