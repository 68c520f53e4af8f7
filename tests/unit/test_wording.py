"""Messages name settings as the user gives them, and values of any length fit a terminal."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace
from headrace.app.keywords import RunKeywords, ServerKeywords
from headrace.cli.app import app, declare_settings
from headrace.errors import ConfigError, RecordError, nearest, text_of
from headrace.jobs.settings import Limits
from headrace.options import NAMES
from headrace.records import Failed, Record
from headrace.serving.limits import ServeLimits
from headrace.wording import (
    LONGEST,
    Interface,
    shortened,
    shown,
    speak,
    spelled,
)


@pytest.fixture(autouse=True)
def _door() -> Iterator[None]:
    declare_settings()
    yield
    speak("python")


@pytest.mark.parametrize(
    ("message", "flags", "python", "keys"),
    [
        ("pass ``overwrite=True`` to start", "pass --overwrite to start", "pass overwrite=True to start", None),
        ("take ``input_delimiter=;``", "take --input-delimiter ';'", 'take input_delimiter=";"', None),
        ("``schema_in_prompt=False``", "--no-schema-in-prompt", "schema_in_prompt=False", None),
        ('or give ``id_column=""`` to use', 'or give --id-column "" to use', 'or give id_column="" to use', None),
        (
            "name yours with ``text_column``; did",
            "name yours with --text-column; did",
            "name yours with text_column; did",
            "*",
        ),
        ("with ``image_column``", "with --image-column", "with text_column", "with text_column"),
        (
            "it (``on_too_long=split``)",
            "it (--on-too-long split)",
            'it (on_too_long="split")',
            "it (on_too_long: split)",
        ),
        (
            "than ``max_errors=30`` allows",
            "than --max-errors 30 allows",
            "than max_errors=30 allows",
            None,
        ),
        ("leave ``order`` out: it", "leave --order out: it", "leave order out: it", None),
        (
            "``engine_process=True`` ends it",
            "--engine-process ends it",
            "engine_process=True ends it",
            "engine_process: true ends it",
        ),
        ("2 s (``engine_timeout_s``)", "2 s (--engine-timeout)", "2 s (engine_timeout_s)", "*"),
        ("with ``sql='SELECT a, b'``", "with --sql 'SELECT a, b'", "with sql='SELECT a, b'", None),
        ("set ``model=FOLDER`` or", "set --model FOLDER or", "set model=FOLDER or", "set model: FOLDER or"),
        (
            "``engine=module:function``",
            "--engine module:function",
            'engine="module:function"',
            "engine: module:function",
        ),
        ("``source=-`` needs ``input_format``", "-i - needs --input-format", 'source="-" needs input_format', None),
        (
            "``dtype=float32, ignore_changes=True`` to",
            "--dtype float32 --ignore-changes to",
            'dtype="float32", ignore_changes=True to',
            "dtype: float32, --ignore-changes to",
        ),
        (
            "``shard=0/2`` and ``order=auto``",
            "--shard 0/2 and --order auto",
            'shard=(0, 2) and order="auto"',
            None,
        ),
        ("``device=cuda:1`` is", "--device cuda:1 is", 'device="cuda:1" is', "device: cuda:1 is"),
        ("``headrace serve state=DIR``", "headrace serve --state-dir DIR", "headrace serve --state-dir DIR", None),
        ("the text is '--overwrite' or `model`", "the text is '--overwrite' or `model`", "*", "*"),
    ],
)
def test_each_door_names_a_setting_in_its_own_terms(message: str, flags: str, python: str, keys: str | None) -> None:
    """What no file of steps or models has as a key stays a flag beside it."""
    python = flags if python == "*" else python
    doors: tuple[tuple[Interface, str], ...] = (
        ("flags", flags), ("python", python), ("keys", flags if keys is None else python if keys == "*" else keys),
    )  # fmt: skip
    for door, expected in doors:
        speak(door)
        assert (spelled(message), str(ConfigError(message))) == (expected, expected)


@functools.cache
def _nodes() -> dict[Path, list[ast.AST]]:
    """All nodes of each module; reading them takes seconds."""
    root = Path(headrace.__file__).parent
    paths = root.rglob("*.py")
    return {path.relative_to(root): list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


def _texts() -> Iterator[tuple[Path, str]]:
    """All texts of the library outside the command line that are neither docstrings nor declarations of flags."""
    for path, nodes in _nodes().items():
        if path.parts[0] in ("cli", "options.py", "wording.py") or "page" in path.parts:
            continue
        documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        declarations = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "flags"]
        documented |= {id(node) for one in declarations for node in ast.walk(one)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield path, node.value


def test_no_message_spells_a_flag() -> None:
    """`bench.py` calls another program; advice is kept under the flag that it is about."""
    found = [(path.name, text) for path, text in _texts() if re.search(r"(?<![\w\-/.'\"=(])--[a-z][a-z-]+", text)]
    assert [one for one in found if "nvidia-smi" not in one[1] and one[0] != "bench.py" and one[1] != "--dtype"] == []


def test_every_setting_in_a_message_is_a_keyword_or_of_the_command_alone() -> None:
    known = {name for kind in (RunKeywords, ServerKeywords) for name in kind.__annotations__}
    known |= {"source", "sink", "model", "name", *NAMES} | {
        one.name for kind in (Limits, ServeLimits) for one in fields(kind)
    }
    found = {name for _, text in _texts() for name in re.findall(r"(?<!`)``(?:headrace \w+ )?([a-z_]+)", text)}
    assert len(found) > 30, "the search works"
    own = {"api_key_file", "budgets", "config", "data_parallel_size", "gpu_hour_price", "grpc_port", "on", "port"}
    assert found - known <= own | {"timeout"}


def _refusals() -> Iterator[tuple[str, str]]:
    """The texts of errors that refuse a setting, outside the parts that are called from Python alone."""
    for path, nodes in _nodes().items():
        if path.parts[0] in ("batching", "concurrency", "pool", "testing.py", "client.py", "cli"):
            continue
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSALS:
                for argument in node.args:
                    parts = [one for one in ast.walk(argument) if isinstance(one, ast.Constant)]
                    yield path.name, "\0".join(str(part.value) for part in parts)


REFUSALS = ("ConfigError", "EngineError", "JobError", "MissingExtraError", "ResumeMismatchError")


def test_a_refusal_marks_the_settings_that_it_names() -> None:
    """Names of one word are words of English too, and so not looked for."""
    found = [(name, re.sub(r"``.+?``", "", text, flags=re.DOTALL)) for name, text in _refusals()]
    assert len(found) > 300, "the search works"
    bare = re.compile(rf"(?<![\w.`'/-])({'|'.join(name for name in NAMES if '_' in name)})(?![\w`'/])")
    assert [(name, said[0]) for name, text in found if (said := bare.search(text))] == []


def test_the_command_names_flags_and_leaves_python_as_it_was() -> None:
    said = CliRunner().invoke(app, ["run", "-i", "-", "-o", "x.parquet"]).stderr
    assert "-i - needs --input-format" in said
    assert str(ConfigError("pass ``overwrite=True``")) == "pass overwrite=True"


@pytest.mark.parametrize(
    "value", ["a" * 1_000_000, "a b " * 250_000, "it's " * 200_000, "é" * 1_000_000, '"' * 1_000_000]
)
def test_a_value_of_a_megabyte_is_cut_in_its_middle_and_its_length_told(value: str) -> None:
    message = str(ConfigError(f"id {value!r} comes twice: name another"))
    assert len(message) < 400
    assert message.startswith(f"id {value!r:.50}")
    assert message.endswith(f"({len(repr(value)) - 2:,} characters) comes twice: name another")
    assert Failed.of(Record(0, 0, None), RecordError(f"column 'text' is {value!r}"), 1).message.count("characters") == 1
    assert len(text_of(ValueError(value))) <= LONGEST + 100, "an error of others too"


def test_prose_and_paths_stay_whole() -> None:
    path = "/".join(["folder"] * 35)
    for message in (
        f"cannot read {path}: No such file",
        "it's the user's " * 30,
        "known: " + ", ".join(["option"] * 200),
    ):
        assert shortened(message) == message


def test_a_long_message_keeps_its_begin_and_its_end_at_borders_of_words() -> None:
    found = shortened("begin " + "word " * 2000 + "end")
    assert found.startswith("begin word word")
    assert found.endswith("word end (10,009 characters in all)")
    assert set(found.partition(" … ")[0].split()) == {"begin", "word"}


def test_a_shown_value_is_short() -> None:
    assert shown("short") == "'short'"
    assert shown("x" * 1000) == f"'{'x' * 39}…{'x' * 19}' (1,000 characters)"
    assert shown([1] * 1000).endswith("1, 1, … (3,000 characters)"), "cut between its items"


@pytest.mark.parametrize("command", ["report", "top", "inspect"])
def test_a_command_without_settings_of_its_own_names_flags(command: str) -> None:
    code = (
        f"from headrace.cli import app; app._command({command!r})\n"
        "from headrace.wording import spelled\n"
        "print(spelled('``prepare`` ``endpoints`` ``batch_timeout_s``', 'flags'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "--map --endpoint --batch-timeout-ms\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--batch-sise", "; did you mean --batch-size?"),
        ("--batch", "; did you mean --batch-tokens or --batch-size?"),
        ("--b", ""),
        ("--colour", ""),
    ],
)
def test_names_that_are_alike_or_begin_alike_are_suggested(name: str, hint: str) -> None:
    assert nearest(name, ["--batch-tokens", "--batch-size", "--model"]) == hint
