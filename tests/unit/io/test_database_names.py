"""Addresses of databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.io.sinks.targets import find_target
from headrace.io.storage.addresses import display_name, is_address, parse_address, parse_table, without_password

SECRET = "postgresql://me:p%40ss@db.example.com:5433/shop?sslpassword=p%40ss&table=a%20b&schema=mine"


def test_a_secret_is_in_nothing_that_is_shown() -> None:
    address = parse_table(SECRET)
    assert (address.table, address.schema) == ("a b", "mine")
    assert "p%40ss" in address.url and "table=" not in address.url
    assert address.shown == "postgresql://db.example.com:5433/shop?table=a%20b&schema=mine"
    assert "p%40ss" not in f"{display_name(SECRET)} {without_password(SECRET)} {address.folder}"
    assert without_password(SECRET) == "postgresql://me@db.example.com:5433/shop"


@pytest.mark.parametrize(
    "name",
    ["postgresql://me:a/b@host/db", "postgresql://me:a#b@host/db?table=t", "postgresql://me:a:b/c@host:1/db"],
)
def test_a_password_that_is_not_encoded_is_refused_without_showing_it(name: str) -> None:
    with pytest.raises(ConfigError, match="percent-encoded") as raised:
        parse_address(name)
    assert "me:a" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("postgresql://host/db", r"names no table: add \?table=NAME"),
        ("qdrant://host?table=x", "names no collection: add &collection=NAME"),
        ("sqlite:///a.db?table=", "names no table"),
        ("sqlite:///a.db?table=%00", "null character"),
        ("duckdb:///a.db?table=x", "duckdb can only be read"),
    ],
)
def test_an_address_without_a_table_is_no_output(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_target(name)


def test_each_table_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["sqlite:///a.db?table=a", "sqlite:///a.db?table=b", "sqlite:///b/a.db?table=a", "lancedb:///a.db?table=a"]
    assert len({parse_table(name).folder for name in names}) == 4
    Path("other").mkdir()
    before = parse_table(names[0]).folder
    monkeypatch.chdir("other")
    assert parse_table(names[0]).folder != before, "a relative path is another database in another folder"


def test_other_names_are_no_databases() -> None:
    for name in ("out.jsonl", "s3://bucket/x", "hf://datasets/a/b", "sqlite.jsonl", Path("sqlite:///x"), None, 5):
        assert not is_address(name)
