"""Engines of one's own: what `module:name` may stand for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.base import BatchEngine, Prepared
from headrace.engines.choosing.registry import create
from headrace.engines.profile import EngineProfile
from headrace.errors import BadResultError, ConfigError, EngineDeadError
from headrace.testing import FakeEngine


def upper(values: list[str]) -> list[str]:
    return [value.upper() for value in values]


def returns(result: Any) -> Any:
    return lambda values: result


class Counter:
    """Made once, called for every batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: list[str]) -> list[int]:
        self.calls += 1
        return [self.calls] * len(values)


class Reverser:
    def reverse(self, values: list[str]) -> list[str]:
        return [value[::-1] for value in values]


class Ambiguous:
    def one(self) -> None: ...
    def two(self) -> None: ...


async def slow(values: list[str]) -> list[str]:
    return values


def whole(model: str | Path | None = None, *, dimension: int = 8) -> FakeEngine:
    return FakeEngine(str(model), dimension=dimension)


def scaled(model: str | None, *, scale: int = 1) -> Any:
    return lambda values: [f"{model}{value * scale}" for value in values]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", sys.modules[__name__])


def outputs(engine: BatchEngine, values: Sequence[Any]) -> list[Any]:
    ready = engine.prepare(values)
    return list(engine.forward([one.payload for one in ready if isinstance(one, Prepared)]))


def test_a_plain_function_is_an_engine() -> None:
    engine = create("custom", engine="own:upper")
    assert outputs(engine, ["a", "b"]) == ["A", "B"]
    assert engine.describe() == {"engine": "own:upper", "model": None}
    assert engine.profile == EngineProfile(batching="batches", cost_unit="records", batch_cost=32, batch_size=32)


def test_a_class_with_one_method_is_made_once() -> None:
    counter = create("custom", engine="own:Counter", batch_size=2)
    assert [outputs(counter, ["a", "b"]), outputs(counter, ["c"])] == [[1, 1], [2]]
    assert counter.profile.batch_size == 2
    assert outputs(create("custom", engine="own:Reverser"), ["abc"]) == ["cba"]


def test_a_factory_is_told_by_its_first_parameter() -> None:
    engine = create("custom", "m", engine="own:whole", dimension=3)
    assert isinstance(engine, FakeEngine)
    assert len(engine.forward(["a"])[0]) == 3
    made = create("custom", "m:", engine="own:scaled", scale=2, batch_size=5)
    assert outputs(made, ["ab"]) == ["m:abab"]
    assert made.profile.batch_size == 5
    assert made.describe()["model"] == "m:"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("whole", {"dimensoin": 3}, "dimensoin: 'own:whole' has no such option"),
        ("upper", {"scale": 3}, "scale: .* has no such option; known: batch_size"),
        ("upper", {"batch_size": 0}, "batch_size is 0: it must be an int >= 1"),
        ("Ambiguous", {}, r"2 public methods \(one, two\); it must have one"),
        ("slow", {}, "is an async function: it must be a plain function"),
    ],
)
def test_what_cannot_be_an_engine_says_why(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create("custom", engine=f"own:{name}", **options)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (["one"], "returned 1 results for batch of 2"),
        ("ab", "own:wrong returned str for batch of 2 records: return a list"),
        ({"a": 1, "b": 2}, "returned dict"),
        ({1, 2}, "returned set"),
        (None, "returned NoneType"),
    ],
)
def test_a_wrong_result_is_named(result: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["own"], "wrong", returns(result), raising=False)
    with pytest.raises(BadResultError, match=words):
        outputs(create("custom", engine="own:wrong"), ["a", "b"])


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "headrace_own_engine.py").write_text(
        "def double(values):\n    return [value * 2 for value in values]\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert outputs(create("custom", engine="headrace_own_engine:double"), [2]) == [4]


def test_a_closed_engine_says_so() -> None:
    engine = create("custom", engine="own:upper")
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.forward(["a"])
