"""A setting of another type than it has is one error that names it, its value and what it takes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.app.jobs.job import JobSettings, check
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError
from headrace.io.sources.selection import Selection
from headrace.jobs.settings import Limits

NEVER = object()
"""Of no setting's type."""


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("limits", 3, "a Limits"),
        ("limits", 0, "a Limits"),
        ("limits", Limits(workers=1.5), "a whole number or None"),  # type: ignore[arg-type]
        ("shard", 1, "a tuple of a whole number and a whole number or None"),
        ("shard", (1, 2, 3), "a tuple of a whole number and a whole number or None"),
        ("sample", "x", "a number or None"),
        ("sample_seed", "x", "a whole number"),
        ("limit", 1.5, "a whole number or None"),
        ("batch_size", "x", "a whole number or None"),
        ("batch_size", True, "a whole number or None"),
        ("batch_tokens", [1], "a whole number or None"),
        ("engine_timeout_s", "1", "a number or None"),
        ("keep_columns", [1], "a tuple, each item a text"),
        ("keep_columns", 5, "a tuple, each item a text"),
        ("model", 5, "a text or None"),
        ("task", 5, "a text or None"),
        ("overwrite", "yes", "True or False"),
        ("on_nan", "zero", "one of null, error"),
        ("worker_kind", "fiber", "one of auto, thread, process"),
        ("prepare", 5, "a function or a text or None"),
    ],
)
def test_a_wrong_type_is_named(tmp_path: Path, name: str, value: Any, takes: str) -> None:
    with pytest.raises(ConfigError) as raised:
        headrace.run(["a"], sink=tmp_path / "out.jsonl", engine="headrace.testing:FakeEngine", **{name: value})
    said = str(raised.value)
    assert said.startswith("workers is 1.5" if isinstance(value, Limits) else f"{name} is ")
    assert said.endswith(f"; it must be {takes}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": "x"}, "workers: 'x' is neither a number nor auto"),
        ({"buffer_memory": "much"}, "buffer_memory: 'much' is not a size; write 512MB or 2GB, for example"),
        ({"shard": "1"}, "shard is '1'; write i/n, such as 0/4 for the first of four"),
        ({"keep_columns": "none"}, "has a column 'none'"),
    ],
)
def test_a_text_is_read_as_that_of_a_flag(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        headrace.run(["a"], sink=tmp_path / "out.jsonl", engine="headrace.testing:FakeEngine", **given)
    assert words in str(raised.value)


@pytest.mark.parametrize("kind", [JobSettings, EngineConfig, Selection, Limits])
def test_no_setting_is_left_out(kind: type[Any], tmp_path: Path) -> None:
    for field in fields(kind):
        if field.name in ("source", "engine"):
            continue  # which take objects of any type
        with pytest.raises(ConfigError, match="sink" if field.name == "sink" else f"{field.name} is <object"):
            make(kind, tmp_path / "o.jsonl", {field.name: NEVER})


def make(kind: type[Any], sink: Path, given: dict[str, Any]) -> None:
    if kind is Selection:
        Selection(**given)
    own: dict[str, Any] = {"config": EngineConfig(**given)} if kind is EngineConfig else given
    own = {"limits": Limits(**given)} if kind is Limits else own
    check(JobSettings(**({"source": ["a"], "sink": sink} | own)))


@pytest.mark.parametrize("value", [print, 1, None, "no"])
def test_a_progress_that_would_never_be_called_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"progress is .*; it must be True or False; .* listeners=\[function\]"):
        headrace.run(["a"], sink=tmp_path / "out.jsonl", engine="headrace.testing:FakeEngine", progress=value)
    assert list(tmp_path.iterdir()) == []
