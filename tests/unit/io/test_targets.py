from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError, MissingExtraError
from headrace.io.locations import locate
from headrace.io.targets import find_target


@pytest.mark.parametrize(
    ("name", "format", "found", "errors"),
    [
        ("out.jsonl", None, (False, "jsonl", ""), "out.errors.jsonl"),
        ("out.jsonl.gz", None, (False, "jsonl", ".gz"), "out.errors.jsonl"),
        ("a.b.parquet", None, (False, "parquet", ""), "a.b.errors.jsonl"),
        ("out.dat", "parquet", (False, "parquet", ""), "out.errors.jsonl"),
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
        ("out.csv", None, r"it must end in \.jsonl or \.parquet, or in / for a folder"),
        ("out", None, "it must end in"),
        ("out.jsonl", "csv", "unknown output format 'csv'; known: jsonl, parquet"),
        ("out.parquet.gz", None, "leave .gz away"),
    ],
)
def test_a_name_that_does_not_tell_is_refused(name: str, format: str | None, message: str) -> None:  # noqa: A002
    with pytest.raises(ConfigError, match=message):
        find_target(name, format)


def test_a_store_without_its_client_names_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("upath")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"gs:// needs a client .*gcsfs.*: pip install gcsfs"):
        locate("gs://bucket/in.jsonl")
