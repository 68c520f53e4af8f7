"""A setting is declared once: every door refuses the same values in the same words, and the docs have its row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from scripts.options_page import FILE, FILES, page
from typer.testing import CliRunner

import headrace
from headrace import build_app
from headrace.app.jobs.plan import check, fingerprint
from headrace.app.jobs.step_settings import parse_steps
from headrace.cli.app import app
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.io.formats.known import known_formats
from headrace.jobs.settings import JobSettings
from headrace.options import Declared, all_declared, declared
from headrace.plugins import known
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
        (("--truncat-dim", "3"), {"truncat_dim": 3}, "task 'embed' has no such option; known: "),
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
    name = next(iter(given))
    said, told = by_command(*flags), by_keyword(**given)
    assert words in said
    assert words in told
    if len(flags) > 2:
        return
    Path("job.yaml").write_text(f"{name}: {given[name]}")
    assert by_command("--config", "job.yaml") == f"job.yaml: {told}"
    assert said.startswith(f"--{told.partition(';')[0].replace('_', '-')}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", "x", "--gpu-hour-price", "-1"), "--gpu-hour-price is -1; it must be >= 0"),
        (("top", "x", "--interval", "0"), "--interval is 0; it must be between 0.2 and 3600"),
        (("serve", "--max-body-bytes", "0"), "--max-body-bytes is 0; it must be >= 1"),
        (
            ("serve", "--max-body-bytes", "big"),
            "--max-body-bytes: 'big' is not a size; write 512MB or 2GB, for example",
        ),
    ],
)
def test_every_command_refuses_in_the_same_words(arguments: tuple[str, ...], words: str) -> None:
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert (ended.exit_code, ended.output) == (2, f"headrace: {words}\n")


def test_the_help_names_what_is_registered() -> None:
    """Names in texts of help come from the registry, so that a plugin's stand there, too."""
    every = {one.name: one.option.help for one in all_declared(headrace.JobSettings)}
    for name in known_formats():
        assert name in every["source"]
    for group, setting in (("sources", "source"), ("sinks", "sink")):
        assert all(f"{name}://" in every[setting] for name in known(group) if name.isalpha())  # type: ignore[arg-type]
    assert all(plugin.rpartition(".")[2] in every["engine"] for plugin in known("engines"))


def test_an_option_that_another_excludes_is_refused_in_the_same_words() -> None:
    said = "{} is 4, but no text is split: set --on-too-long split"
    assert by_command("--chunk-overlap", "4") == said.format("--chunk-overlap")
    assert by_command(env={"HEADRACE_CHUNK_OVERLAP": "4"}) == said.format("HEADRACE_CHUNK_OVERLAP")
    assert by_keyword(chunk_overlap=4) == 'chunk_overlap is 4, but no text is split: set on_too_long="split"'


def test_a_setting_that_has_no_effect_beside_another_is_refused_in_the_same_words() -> None:
    said = "{} has no effect beside {}, which {}: leave one out"
    made, again = "names the columns of the text", "starts again, with nothing to compare"
    for name in ("text-column", "text-pair-column"):
        flags = (f"--{name}", "text", "--prompt-template", "{text}")
        assert by_command(*flags) == said.format(f"--{name}", "--prompt-template", made)
    variable = by_command("--prompt-template", "{text}", env={"HEADRACE_TEXT_COLUMN": "text"})
    assert variable == said.format("HEADRACE_TEXT_COLUMN", "--prompt-template", made)
    assert by_command("--overwrite", "--ignore-changes") == said.format("--ignore-changes", "--overwrite", again)
    assert by_keyword(overwrite=True, ignore_changes=True) == said.format("ignore_changes", "overwrite", again)
    given = {"text_column": "text", "prompt_template": "{text}"}
    assert by_keyword(**given) == said.format("text_column", "prompt_template", made)
    assert by_keyword(steps=[given]) == f"step 'embedding': {by_keyword(**given)}"


def test_a_setting_that_has_no_effect_without_another_is_refused_in_the_same_words() -> None:
    said = "{} has no effect without {}: leave it out"
    assert by_command("--sample-seed", "3") == said.format("--sample-seed 3", "--sample")
    assert by_keyword(sample_seed=3) == said.format("sample_seed=3", "sample")
    assert by_keyword(selection=headrace.Selection(sample_seed=3)) == said.format("sample_seed=3", "sample")
    forms = "--output-schema or --answer-regex or --choices"
    assert by_command("--reask", "3") == said.format("--reask 3", forms)
    assert by_command("--no-schema-in-prompt") == said.format("--no-schema-in-prompt", forms)
    assert by_command("--worker-kind", "process") == said.format("--worker-kind process", "--map or --finish")
    refused_kind = said.format('worker_kind="thread"', "prepare or finish")
    assert by_keyword(worker_kind="thread") == refused_kind
    two = {"steps": [{"name": "one"}, {"name": "two"}], "worker_kind": "thread"}
    assert by_keyword(**two) == f"step 'one': {refused_kind}"


def test_the_name_of_a_flag_has_its_keyword_in_python() -> None:
    said = "{} is the name of a flag; its keyword in Python is {}"
    assert by_keyword(map="m:f") == said.format("map", "prepare")
    assert by_keyword(engine_timeout=3) == said.format("engine_timeout", "engine_timeout_s")
    assert by_keyword(encoding="utf-16") == said.format("encoding", "input_encoding")
    with headrace.load(engine=FAKE) as model:
        assert refused(lambda: model.run([], sink="list", map="m:f")) == said.format("map", "prepare")  # type: ignore[call-arg]


def test_a_text_is_read_alike_at_every_door() -> None:
    words = "'many' is not a size; write 512MB or 2GB, for example"
    assert by_command("--buffer-memory", "many") == f"--buffer-memory: {words}"
    assert by_keyword(buffer_memory="many") == f"buffer_memory: {words}"
    assert refused(lambda: headrace.Limits(buffer_memory="many")) == f"buffer_memory: {words}"  # type: ignore[arg-type]
    assert by_command("--shard", "4/2") == "--shard is 4/2; it must be i/n with 0 <= i < n"
    for shard in ((4, 2), "4/2"):
        assert by_keyword(shard=shard) == "shard is 4/2; it must be i/n with 0 <= i < n"
    found = headrace.Limits(buffer_memory="2GB", workers="auto")  # type: ignore[arg-type]
    assert found == headrace.Limits(buffer_memory=2_000_000_000)
    rows = headrace.run(
        ["a", "b"], sink="list", engine=FAKE, workers="auto", buffer_memory="512MB", shard="1/2", progress=False
    )
    assert [row["id"] for row in rows] == [1]
    assert headrace.ServerSettings(batch_timeout_s=2).batch_timeout_s == 2, "a flag's unit is the flag's alone"


def test_a_setting_that_an_object_does_not_know_is_refused_with_the_nearest_name() -> None:
    said = refused(lambda: headrace.Limits(max_eror=1))  # type: ignore[call-arg]
    assert said == "Limits has no setting 'max_eror'; did you mean max_errors?"
    said = refused(lambda: headrace.Embedding(nope=3))  # type: ignore[call-arg]
    assert said.startswith("Embedding has no setting 'nope'; known: model, ")
    every: tuple[Any, ...] = (headrace.ServeLimits, headrace.ServerSettings, headrace.Selection, headrace.JobSettings)
    for kind in every:
        assert f"{kind.__name__} has no setting 'nope'; known: " in refused(functools.partial(kind, nope=1))


def test_a_setting_in_an_object_and_beside_it_is_refused() -> None:
    def twice(name: str, what: str) -> str:
        return f"{name} is given twice, in {what} and beside it; give it once"

    assert by_keyword(limits=headrace.Limits(max_errors=3), max_errors=3) == twice("max_errors", "limits")
    assert by_keyword(selection=headrace.Selection(limit=3), limit=5) == twice("limit", "selection")
    limits = headrace.ServeLimits(max_requests=5)
    assert refused(lambda: build_app(limits=limits, max_requests=6)) == twice("max_requests", "limits")
    chosen = EngineConfig("embed", engine=FAKE, batch_size=3)

    class Choice:
        def as_config(self) -> EngineConfig:
            return chosen

    assert by_keyword(engine=Choice(), batch_size=2) == twice("batch_size", "engine")


def test_a_flag_that_is_refused_keeps_its_unit() -> None:
    for name, value, words in (
        ("BATCH_TIMEOUT_MS", "-1", " is -1; it must be >= 0"),
        ("LATENCY_TARGET_MS", "0", " is 0; it must be a finite number > 0"),
        ("BATCH_TIMEOUT_MS", "soon", " is 'soon'; it must be a number"),
    ):
        variable, flag = f"HEADRACE_{name}", f"--{name.lower().replace('_', '-')}"
        for given, flags, env in ((flag, (flag, value), {}), (variable, (), {variable: value})):
            ended = CliRunner().invoke(app, ["serve", *flags], env={"COLUMNS": "300", **env})
            assert ended.output == f"headrace: {given}{words}\n"


def test_a_refusal_names_what_gave_the_value() -> None:
    """A way out is a flag: it wins over a variable."""
    assert by_command(env={"HEADRACE_ON": "moon"}).startswith("HEADRACE_ON is 'moon'; it must be ray")
    assert by_command("--on", "moon", env={"HEADRACE_ON": "sun"}).startswith("--on is 'moon'")
    said = by_command("--engine", FAKE, env={"HEADRACE_TEXT_COLUMN": "tekst"})
    assert "HEADRACE_TEXT_COLUMN" in said
    assert "--text-column" not in said


def test_a_variable_gives_a_setting_by_any_name_of_its_flag_and_an_option_that_has_no_line_of_its_own() -> None:
    assert "HEADRACE_PROMPT_COLUMN" in by_command("--engine", FAKE, env={"HEADRACE_PROMPT_COLUMN": "tekst"})
    assert by_command(env={"HEADRACE_PROMPT_COLUMN": "a", "HEADRACE_IMAGE_COLUMN": "b"}) == (
        "HEADRACE_PROMPT_COLUMN and HEADRACE_IMAGE_COLUMN give the same setting; keep one of them"
    )
    classify = ("--task", "classify", "--model", "docstrings")
    env = {"HEADRACE_TOP_LABELS": "x"}
    assert by_command(*classify, env=env) == "HEADRACE_TOP_LABELS is 'x'; it must be a whole number or None"
    assert by_command(*classify, "--top-labels", "y", env=env).startswith("--top-labels is 'y'")
    assert by_command(env=env).startswith("HEADRACE_TOP_LABELS: task 'embed' has no such option; known: ")


def test_a_file_of_steps_is_refused_in_its_keys_and_flags_beside_it_as_flags() -> None:
    def steps(text: str, *flags: str) -> str:
        Path("steps.yaml").write_text(f"steps: [{text}]")
        return by_command("--config", "steps.yaml", *flags)

    said = steps("{task: embed, engine_options: {truncat_dim: 3}}")
    assert said.startswith("step 'embedding': truncat_dim: task 'embed' has no such option")
    said = steps("{task: embed, engine_options: {chunk_overlap: 3}}")
    assert said == "step 'embedding': chunk_overlap is 3, but no text is split: set on_too_long: split"
    assert steps("{task: embed}", "--batch-size", "3").startswith("--batch-size is a setting of one step")
    assert steps("{task: embed}", "--device", "cpu").startswith("--device is a setting of one step")
    assert steps("{task: embed}", "--order", "prefix").endswith("leave --order out")


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
    env = {
        "HEADRACE_MAX_EROR": "3",
        "HEADRACE_DIMENSION": "3",
        "HEADRACE_PORT": "tcp://10.0.0.1:80",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
    }
    status, said = ran("-i", "in.jsonl", "-o", "out.jsonl", env=env)
    assert status == 0
    assert "the environment variable HEADRACE_MAX_EROR is unknown; did you mean HEADRACE_MAX_ERRORS" in said
    assert "HEADRACE_PORT" not in said.replace("HEADRACE_PORT_", "")
    assert "SERVICE" not in said
    assert "DIMENSION" not in said, "which the program may read itself"


def test_a_server_takes_its_settings_from_the_environment() -> None:
    for name, value, words in (
        ("HEADRACE_PORT", "x", "HEADRACE_PORT is 'x'; it must be a whole number"),
        ("HEADRACE_MAX_WAIT", "0", "HEADRACE_MAX_WAIT is 0; it must be a finite number > 0"),
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
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert "<!-- options: " in text
        assert text == page(text), "run: python scripts/options_page.py"
    text = FILE.read_text(encoding="utf-8")
    broken = text.replace("| `max_errors` | `--max-errors` |", "| `max_errors` | `--most-errors` |")
    assert broken != page(broken) == text


@pytest.mark.parametrize("kind", [headrace.JobSettings, headrace.ServerSettings])
def test_a_setting_says_what_it_does_and_no_two_have_one_name(kind: type) -> None:
    every = all_declared(kind)
    assert all(one.option.help.endswith((".", ")")) for one in every)
    for names in ([one.name for one in every], [flag for one in every for flag in one.flags]):
        assert len(names) == len(set(names))
    variables = [variable for one in every for variable in one.variables]
    assert len(variables) == len(set(variables))
    assert all("/--no-" in one.flags[0] for one in every if one.default is True and one.flags)


def test_a_variable_is_named_after_the_flag() -> None:
    found: dict[str, Declared] = {one.name: one for one in all_declared(headrace.JobSettings)}
    assert found["source"].variables == ("HEADRACE_INPUT_FILE",)
    assert found["prepare"].variables == ("HEADRACE_MAP",)
    assert found["dedupe"].variables == ("HEADRACE_DEDUPE",)
    assert found["text_column"].variables[1] == "HEADRACE_PROMPT_COLUMN"


CHANGES: dict[str, tuple[str, Any]] = {
    "input_delimiter": ("embed", ","),
    "input_encoding": ("embed", "cp1252"),
    "text_column": ("embed", "body"),
    "text_pair_column": ("score", "key"),
    "documents_column": ("score", "list"),
    "id_column": ("embed", "key"),
    "prompt_template": ("generate", "Say {text}"),
    "output_schema": ("generate", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    "answer_regex": ("generate", "[0-9]+"),
    "choices": ("generate", ("yes", "no")),
    "schema_in_prompt": ("generate", False),
    "n": ("generate", 2),
    "best_of": ("generate", 2),
    "keep_columns": ("embed", ("body",)),
    "flatten": ("classify", ("label",)),
    "prepare": ("embed", "json:loads"),
    "finish": ("embed", "json:loads"),
}
"""A value other than the default for each setting that changes outputs, and the task of a job that takes it."""
MODELS = {"embed": None, "classify": "docstrings", "score": "docstrings", "generate": "arithmetic"}


@pytest.mark.parametrize("name", [one.name for one in declared(JobSettings) if one.option.changes_output])
def test_a_setting_that_changes_outputs_is_part_of_the_fingerprint(name: str, tmp_path: Path) -> None:
    """The one that a job began with is compared when it goes on: `changes_output` in its declaration is enough."""
    source = tmp_path / "rows.csv"
    source.write_text("id,key,text,body,list\n1,2,one,two,three\n")
    task, value = CHANGES[name]
    given: dict[str, Any] = {"choices": ("a", "b")} if name == "schema_in_prompt" else {}
    pair = {"text_pair_column": "body"} if task == "score" else {}
    sampling = {"temperature": 0.5} if task == "generate" else {}
    config = EngineConfig(task, model=MODELS[task], engine_options=sampling)

    def facts(**changed: Any) -> dict[str, object]:
        return fingerprint(check(JobSettings(str(source), "out.jsonl", config=config, **{**given, **changed})), {})

    changed = {name: value} if name == "documents_column" else pair | {name: value}
    assert facts(**pair) != facts(**changed)
