"""Engines by name, without loading one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.engines.registry import create, known_tasks, load_factory
from headrace.errors import ConfigError, MissingExtraError


class Engine:
    def __init__(self, model: str | Path | None, *, scale: int = 1) -> None:
        self.model, self.scale = model, scale


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown task 'paint'; known: embed, or module:factory"):
        create("paint")
    assert known_tasks() == ("embed",)


def test_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    engine = create("own:Engine", "folder", scale=3)
    assert isinstance(engine, Engine)
    assert (engine.model, engine.scale) == ("folder", 3)


def test_a_mistyped_option_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])
    with pytest.raises(ConfigError, match="no option 'scael'; known: scale"):
        create("own:Engine", scael=3)


@pytest.mark.parametrize("missing", ["torch", "sentence_transformers"])
def test_a_missing_library_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("headrace.engines.embedding", missing):
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


def test_a_reference_may_reach_inside_a_class() -> None:
    found: Sequence[int] = load_factory("builtins:dict.fromkeys")([1])
    assert list(found) == [1]
