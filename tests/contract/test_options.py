"""A setting is declared once: every door refuses the same values in the same words, and the docs have its row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from scripts.options_page import FILE, page
from typer.testing import CliRunner

import headrace
from headrace.app.jobs.step_settings import parse_steps
from headrace.cli.app import app
from headrace.errors import HeadraceError
from headrace.options import Declared, all_declared
from headrace.wording import speak

Said: TypeAlias = str
FAKE = "headrace.testing:FakeEngine"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "one"}\n')


def refused(call: Callable[[], object]) -> Said:
    with pytest.raises(HeadraceError) as raised:
        call()
    return str(raised.value)


def by_command(*flags: str, env: dict[str, str] | None = None) -> Said:
    files = ("-i", "in.jsonl", "-o", "out.jsonl")
    ended = CliRunner().invoke(app, ["run", *files, *flags], env={"COLUMNS": "300", **(env or {})})
    assert ended.exit_code == 2, ended.output
    return ended.output.removeprefix("headrace: ").strip()


def by_keyword(**given: Any) -> Said:
    return refused(lambda: headrace.run("in.jsonl", sink="out.jsonl", progress=False, **given))


def by_key(**given: Any) -> Said:
    speak("keys")
    try:
        return refused(lambda: parse_steps([given]))
    finally:
        speak("python")


def test_a_value_out_of_range_is_refused_in_the_same_words() -> None:
    assert by_command("--max-errors", "-1") == "--max-errors is -1; it must be >= 0"
    assert by_command(env={"HEADRACE_MAX_ERRORS": "-1"}) == "HEADRACE_MAX_ERRORS is -1; it must be >= 0"
    assert by_keyword(max_errors=-1) == "max_errors is -1; it must be >= 0"
    assert by_keyword(limits=headrace.Limits(max_errors=-1)) == "max_errors is -1; it must be >= 0"
    assert by_key(batch_size=0) == "step 1: batch_size is 0; it must be >= 1"
    assert by_command("--batch-size", "0") == "--batch-size is 0; it must be >= 1"


def test_a_value_of_another_type_is_refused_in_the_same_words() -> None:
    assert by_command("--batch-size", "x") == "--batch-size is 'x'; it must be a whole number"
    assert by_command(env={"HEADRACE_BATCH_SIZE": "x"}) == "HEADRACE_BATCH_SIZE is 'x'; it must be a whole number"
    assert by_keyword(batch_size="x") == "batch_size is 'x'; it must be a whole number or None"
    assert by_key(batch_size="x") == "step 1: batch_size is 'x'; it must be a whole number or None"
    assert by_command("--on-nan", "zero") == "--on-nan is 'zero'; it must be one of null, error"
    assert by_keyword(on_nan="zero") == "on_nan is 'zero'; it must be one of null, error"


@pytest.mark.parametrize(
    ("flags", "given", "words"),
    [
        (("--truncat-dim", "3"), {"truncat_dim": 3}, "task 'embed' has no {}; known: "),
        (("--kv-cache-tokens", "3"), {"kv_cache_tokens": 3}, "is an option of engine 'torch' (task 'generate')"),
        (
            ("--device", "cpu", "--device", "cpu"),
            {"device": "cpu", "engine_options": {"device": "cpu"}},
            "is given twice",
        ),
    ],
    ids=["misspelt", "of another engine", "twice"],
)
def test_an_option_that_cannot_be_is_refused_in_the_same_words(
    flags: tuple[str, ...], given: dict[str, Any], words: str
) -> None:
    assert words.format("such flag") in by_command(*flags)
    assert words.format(f"option {next(iter(given))!r}") in by_keyword(**given)


def test_an_option_that_another_excludes_is_refused_in_the_same_words() -> None:
    said = "--chunk-overlap is 4, but no text is split: set --on-too-long split"
    assert by_command("--chunk-overlap", "4") == said
    assert by_command(env={"HEADRACE_CHUNK_OVERLAP": "4"}) == said
    assert by_keyword(chunk_overlap=4) == 'chunk_overlap is 4, but no text is split: set on_too_long="split"'


def test_a_size_and_a_shard_are_texts_on_the_command_line_alone() -> None:
    assert by_command("--buffer-memory", "many").startswith("--buffer-memory: 'many' is not a size")
    assert by_keyword(buffer_memory="many") == "buffer_memory is 'many'; it must be a whole number"
    assert by_command("--shard", "4/2") == "--shard is 4/2; it must be i/n with 0 <= i < n"
    assert by_keyword(shard=(4, 2)) == "shard is 4/2; it must be i/n with 0 <= i < n"


def ran(*flags: str, env: dict[str, str]) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["run", "--engine", FAKE, *flags], env={"COLUMNS": "300", **env})
    return ended.exit_code, ended.output


def test_a_job_takes_its_settings_from_the_environment_and_a_flag_wins() -> None:
    env = {"HEADRACE_INPUT_FILE": "in.jsonl", "HEADRACE_OUTPUT_FILE": "a.jsonl", "HEADRACE_KEEP_COLUMNS": "text"}
    assert ran(env=env)[0] == 0
    assert '"text":"one"' in Path("a.jsonl").read_text()
    assert ran("-o", "b.jsonl", env=env)[0] == 0
    assert Path("b.jsonl").exists()
    assert ran(env=env | {"HEADRACE_OVERWRITE": "true"})[0] == 0


def test_a_variable_that_is_nearly_a_setting_is_told() -> None:
    env = {"HEADRACE_MAX_EROR": "3", "HEADRACE_PORT": "tcp://10.0.0.1:80", "HEADRACE_SERVICE_HOST": "10.0.0.1"}
    status, said = ran("-i", "in.jsonl", "-o", "out.jsonl", env=env)
    assert status == 0
    assert "the environment variable HEADRACE_MAX_EROR is unknown; did you mean HEADRACE_MAX_ERRORS" in said
    assert "HEADRACE_PORT" not in said.replace("HEADRACE_PORT_", "")
    assert "SERVICE" not in said


def test_a_server_takes_its_settings_from_the_environment() -> None:
    for name, value, words in (
        ("HEADRACE_PORT", "x", "HEADRACE_PORT is 'x'; it must be a whole number"),
        ("HEADRACE_MAX_WAIT", "0", "--max-wait is 0.0; it must be a finite number > 0"),
        ("HEADRACE_BATCH_TIMEOUT_MS", "soon", "'soon' is not a number of milliseconds"),
        ("HEADRACE_TASK", "dance", "unknown task 'dance'"),
    ):
        ended = CliRunner().invoke(app, ["serve"], env={"COLUMNS": "300", name: value})
        assert (ended.exit_code, words in ended.output) == (2, True), ended.output


def test_limits_are_given_as_an_object_or_flat_or_both() -> None:
    rows = [{"id": number, "text": "a"} for number in range(3)]
    limits = headrace.Limits(max_errors=0)
    for given in ({"max_errors": 0}, {"limits": limits}, {"limits": limits, "max_attempts": 1}):
        with pytest.raises(headrace.errors.TooManyErrorsError, match="more than max_errors=0 allows"):
            headrace.run(rows, sink="list", engine=_broken, progress=False, **given)


def _broken(texts: list[str]) -> list[str]:
    raise ValueError("broken")


def test_an_engine_with_its_options_is_an_object() -> None:
    class Choice:
        def as_config(self) -> Any:
            from headrace.engines.choosing.config import EngineConfig

            return EngineConfig("embed", engine=FAKE)

    assert len(headrace.run(["a", "b"], sink="list", engine=Choice(), batch_size=1, progress=False)) == 2
    assert by_keyword(engine=Choice(), device="cpu") == "device is a setting of the engine Choice: give it there"


def test_the_page_of_options_is_made_from_their_declarations() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text == page(text), "run: python scripts/options_page.py"
    broken = text.replace("| `max_errors` | `--max-errors` |", "| `max_errors` | `--most-errors` |")
    assert broken != page(broken) == text


@pytest.mark.parametrize("kind", [headrace.JobSettings, headrace.ServerSettings])
def test_a_setting_says_what_it_does_and_no_two_have_one_name(kind: type) -> None:
    every = all_declared(kind)
    assert all(one.option.help.endswith((".", ")")) for one in every)
    for names in ([one.name for one in every], [flag for one in every for flag in one.flags]):
        assert len(names) == len(set(names))
    variables = [one.variable for one in every if one.flags]
    assert len(variables) == len(set(variables))


def test_a_variable_is_named_after_the_flag() -> None:
    found: dict[str, Declared] = {one.name: one for one in all_declared(headrace.JobSettings)}
    assert found["source"].variable == "HEADRACE_INPUT_FILE"
    assert found["prepare"].variable == "HEADRACE_MAP"
    assert found["dedupe"].variable == "HEADRACE_DEDUPE"
