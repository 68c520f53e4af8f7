"""From a model's name to a commit and a folder: what stays local, and how a server names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.identity import identity
from headrace.engines.choosing.registry import declaration
from headrace.engines.choosing.resolving import fetch, remote_model_of, resolve, served_names
from headrace.engines.model_folder import ONNX_WEIGHTS
from headrace.errors import ConfigError

HUB = EngineConfig("embed", "org/name")


@pytest.mark.parametrize(
    "model", [None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2", "./x/y", "digits"]
)
def test_a_local_model_stays_as_it_is(model: str | None) -> None:
    config = EngineConfig("embed", model)
    assert resolve(config) is config
    assert fetch(config) == model


def test_a_folder_comes_before_the_hub_unless_a_commit_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert remote_model_of(HUB) is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert remote_model_of(HUB) is None
    assert remote_model_of(EngineConfig("embed", "org/name", commit="a" * 40)) is not None  # resolved elsewhere


@pytest.mark.parametrize(
    "config", [EngineConfig("embed", "org/name", "endpoint"), EngineConfig("custom", "org/name", "a:b")]
)
def test_the_model_of_another_server_or_of_own_code_is_a_name_of_its_own(config: EngineConfig) -> None:
    assert remote_model_of(config) is None
    assert resolve(config) is config
    assert fetch(config) == "org/name"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (None, ()),
        ("./models/mini", ("mini", "./models/mini")),
        ("org/name", ("org/name",)),
        ("org/name@v1", ("org/name", "org/name@v1")),
        ("hf://org/name", ("org/name", "hf://org/name")),
        ("s3://bucket/mini", ("mini", "s3://bucket/mini")),
    ],
)
def test_requests_may_name_a_model_as_it_was_typed(model: str | None, names: tuple[str, ...]) -> None:
    assert served_names(EngineConfig("embed", model)) == names


def test_a_revision_is_part_of_the_name() -> None:
    with pytest.raises(ConfigError, match='write model="org/name@REVISION"'):
        resolve(EngineConfig("generate", "org/name", "vllm", {"revision": "v1"}))


def test_a_downloaded_model_is_known_by_its_commit_and_not_by_its_files() -> None:
    def known(commit: str | None) -> str | None:
        return identity("embed", "org/name", None, {}, commit)

    assert known(None) is None
    assert known("a" * 40) == known("a" * 40) != known("b" * 40)


def test_only_the_engine_onnx_reads_onnx() -> None:
    assert declaration("embed.onnx").weights == ONNX_WEIGHTS
    assert declaration("embed.torch").weights != ONNX_WEIGHTS
