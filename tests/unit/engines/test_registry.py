"""Engines by name, without loading one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.engines.choosing.registry import check_options, create
from headrace.engines.custom import load_factory
from headrace.engines.tasks import known_tasks
from headrace.errors import ConfigError, MissingExtraError


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="unknown task 'paint'; known: embed, sparse-embed, multi-vector-embed, classify, score"
    ):
        create("paint")
    assert known_tasks()[0] == "embed"


def test_an_unknown_engine_lists_those_of_the_task() -> None:
    with pytest.raises(
        ConfigError, match=r"task 'embed' has no engine 'cuda'; known: torch, onnx, vllm, endpoint, or module:name"
    ):
        create("embed", engine="cuda")
    with pytest.raises(ConfigError, match="task custom needs an engine"):
        create("custom")


@pytest.mark.parametrize("missing", ["torch", "sentence_transformers"])
def test_a_missing_library_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("headrace.engines.text.embedding", missing):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf'needs {missing}.*pip install "headrace\[torch\]"'):
        create("embed")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("json", "write module:attribute"),
        (":loads", "write module:attribute"),
        ("no_such_module:x", "cannot import no_such_module"),
        ("json:loadz", "json has no attribute 'loadz'"),
        ("json:__name__", "type str, which cannot be called"),
    ],
)
def test_a_reference_that_names_no_callable(reference: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_factory(reference)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("mine.py:up", "names a file; give the name of its module: mine:up$"),
        ("./mine.py:up", "its module: mine:up$"),
        ("code/mine.py:up", "its module: mine:up, with 'code' in PYTHONPATH$"),
    ],
)
def test_a_reference_to_a_file_says_what_the_module_is(
    reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def up(texts): return texts")
    with pytest.raises(ConfigError, match=words):
        load_factory(reference)


@pytest.mark.parametrize(
    ("task", "engine"),
    [
        ("sparse-embed", None),
        ("multi-vector-embed", None),
        ("zero-shot", None),
        ("zero-shot", "onnx"),
        ("score", "vllm"),
    ],
)
def test_texts_are_split_only_where_outputs_can_be_joined(task: str, engine: str | None) -> None:
    with pytest.raises(ConfigError, match="on_too_long is 'split', which the engines torch and onnx have"):
        check_options(task, engine, {"on_too_long": "split"})
    with pytest.raises(ConfigError, match="chunk_overlap is 4, but no text is split"):
        check_options("embed", None, {"chunk_overlap": 4})


def test_a_reference_may_reach_inside_a_class() -> None:
    found: Sequence[int] = load_factory("builtins:dict.fromkeys")([1])
    assert list(found) == [1]
