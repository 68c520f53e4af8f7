from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError, MissingExtraError
from headrace.io.sinks.targets import find_target, refuse_output_in_input
from headrace.io.storage.locations import anchored, locate, store


@pytest.mark.parametrize(
    ("name", "format", "found", "errors"),
    [
        ("out.jsonl", None, (False, "jsonl", ""), "out.errors.jsonl"),
        ("out.jsonl.gz", None, (False, "jsonl", ".gz"), "out.errors.jsonl"),
        ("out.tsv.zst", None, (False, "tsv", ".zst"), "out.errors.jsonl"),
        ("a.b.parquet", None, (False, "parquet", ""), "a.b.errors.jsonl"),
        ("out.dat", "parquet", (False, "parquet", ""), "out.errors.jsonl"),
        ("out.gz", "csv", (False, "csv", ".gz"), "out.errors.jsonl"),
        ("OUT.CSV", "csv", (False, "csv", ""), "OUT.errors.jsonl"),
        ("out/", None, (True, "jsonl", ""), "out/_headrace/errors.jsonl"),
        ("out.parquet/", None, (True, "parquet", ""), "out.parquet/_headrace/errors.jsonl"),
        ("out/", "parquet", (True, "parquet", ""), "out/_headrace/errors.jsonl"),
        ("there", None, (True, "jsonl", ""), "there/_headrace/errors.jsonl"),
        (Path("out.jsonl"), None, (False, "jsonl", ""), "out.errors.jsonl"),
        ("file:///tmp/out.jsonl", None, (False, "jsonl", ""), "/tmp/out.errors.jsonl"),
    ],
)
def test_a_name_tells_format_and_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | Path,
    format: str | None,  # noqa: A002 - as it is called
    found: tuple[bool, str, str],
    errors: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    target = find_target(name, format)
    assert (target.is_folder, target.format, target.compression) == found
    assert str(target.errors) == errors


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("out.dat", None, r"it must end in one of \.csv, \.jsonl, \.parquet, \.tsv, or in / for a folder"),
        ("out.json", None, r"json is only read; end it in one of \.csv, \.jsonl"),
        ("out", None, "it must end in"),
        ("out.csv", "parquet", r"cannot write out\.csv as parquet: the name says csv; end it in \.parquet, or leave"),
        ("OUT.TSV.gz", "csv", "the name says tsv"),
        ("out.jsonl/", "parquet", "the name says jsonl"),
        ("out.arrow", "parquet", "arrow is only read"),
        ("out.jsonl", "xlsx", "unknown output format 'xlsx'; known: csv, jsonl, parquet, tsv"),
        ("out.parquet.gz", None, "leave out .gz"),
        ("", None, "the output has an empty name"),
    ],
)
def test_a_name_that_does_not_tell_is_refused(name: str, format: str | None, message: str) -> None:  # noqa: A002
    with pytest.raises(ConfigError, match=message):
        find_target(name, format)


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ("in.jsonl", "in.jsonl"),
        ("link.jsonl", "in.jsonl"),
        ("in", "in/deep/out.jsonl"),
        ("in.errors.jsonl", "in.jsonl"),
        ("*.jsonl", "out.jsonl"),
        ("**/*.jsonl", "deep/er/out.jsonl"),
        ("deep/**/out.jsonl", "deep/out.jsonl"),
        ("out.errors*", "out.parquet"),
    ],
)
def test_an_output_that_a_run_would_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sink: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    with pytest.raises(ConfigError, match="choose another output"):
        refuse_output_in_input(source, find_target(sink))


@pytest.mark.parametrize(
    ("source", "sink"),
    [("in.jsonl", "out.jsonl"), ("*.jsonl", "out.parquet/"), ("a/*.jsonl", "a/b/out.jsonl"), ("s3://b/in", "in.jsonl")],
)
def test_an_output_beside_the_input_is_welcome(source: str, sink: str) -> None:
    refuse_output_in_input(source, find_target(sink))


def test_files_of_the_hub_are_not_written_one_commit_for_each_part() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match=r"can only be read; .* or a dataset of the hub \(hf://datasets/org/name\)"):
        find_target("hf://datasets/me/vectors/data/")


def test_a_store_without_its_client_names_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("upath")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"gs:// needs a client .*gcsfs.*: pip install gcsfs"):
        locate("gs://bucket/in.jsonl")


def test_another_library_may_have_put_its_own_client_in_a_stores_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As flyte does when it is imported: it knows neither our options nor a listing that is not cached."""
    s3fs = pytest.importorskip("s3fs")
    fsspec = importlib.import_module("fsspec")
    other = type("Other", (fsspec.AbstractFileSystem,), {"protocol": "s3"})
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", other)
    place = locate("s3://bucket/in.jsonl")
    assert type(store(place)[0]) is s3fs.S3FileSystem
    assert type(store(place.parent / "out.jsonl")[0]) is s3fs.S3FileSystem


@pytest.mark.parametrize(("name", "whole"), [("a", "/a"), ("a/", "/a/"), (Path("a"), Path("/a")), ("/a", "/a")])
def test_a_name_in_the_root_folder_has_one_slash(
    name: str | Path, whole: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert anchored(name) == whole


@pytest.mark.parametrize("name", ["~/a.jsonl", "~/a/", Path("~/a.parquet"), "~/*.jsonl"])
def test_a_name_in_the_users_folder_is_found_without_a_shell(name: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anyone")
    whole = anchored(name)
    assert str(whole) == str(name).replace("~", "/home/anyone")
    assert str(anchored("a/~/b")).endswith("/a/~/b")
