"""Text files that are not what their name says, folders that name columns, and empty cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance import command

import headrace
from headrace.errors import ConfigError
from headrace.io.storage.hive import partitions
from headrace.jobs.settings import Limits
from headrace.observe.reporting.table import rows as rows_of

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")


def run(source: Path, out: Path, **given: Any) -> Any:
    given = {"engine": lambda inputs: [len(one) for one in inputs], "progress": False} | given
    return headrace.run(str(source), sink=out, limits=Limits(max_error_rate=1), **given)


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def said(source: Path, **given: Any) -> str:
    """The refusal of a job."""
    with pytest.raises(ConfigError) as refusal:
        run(source, source.with_suffix(".out.jsonl"), **given)
    message = str(refusal.value)
    message.encode()  # a lone surrogate would raise
    return message


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str, name: str, ending: str) -> None:
    text = '{"id": 1, "text": "Grüße"}\n' if ending == "jsonl" else "id,text\n1,Grüße\n"
    message = said(written(tmp_path, f"in.{ending}", text.encode(encoding)))
    assert f'is text in {name}: take input_encoding="{name.lower()}"' in message


def test_a_short_text_and_one_with_zeros_are_utf_8(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"\n", b"t\n", b"text\na\0b\0c\0d\0e\0f\0g\0h\0i\0\n")):
        with_column = content if content.startswith(b"text") else b"text\na\n" + content
        run(written(tmp_path, f"{number}.csv", with_column), tmp_path / f"out{number}.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("in.csv", b"id;text\n1;a\n", "the file looks separated by ';': take input_delimiter=\";\""),
        ("in.csv", b"id|text\n1|a\n", "the file looks separated by '|'"),
        ("in.csv", b"id\ttext\n1\ta\n", "the file looks separated by '\\t': take input_format=\"tsv\""),
        ("in.tsv", b"id,text\n1,a\n", "the file looks separated by ',': take input_format=\"csv\""),
        ("in.csv", b"title\na\n", "name yours with text_column"),
    ],
)
def test_another_separator_is_named(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    message = said(written(tmp_path, name, content))
    assert "no record among the first 1 has a column 'text'; they have" in message
    assert hint in message


def test_latin_1_has_its_hint(tmp_path: Path) -> None:
    hint = "not valid UTF-8; a file in Latin-1 or Windows-1252 needs: iconv -f WINDOWS-1252 -t UTF-8"
    header = said(written(tmp_path, "header.csv", "id,naïve,text\n1,a,b\n".encode("latin-1")))
    assert hint in header and "header line" in header
    for name, text in (("in.csv", "id,text\n1,naïve\n2,fine\n"), ("in.jsonl", '{"text": "naïve"}\n{"text": "fine"}\n')):
        out = tmp_path / f"{name}.out.jsonl"
        report = run(written(tmp_path, name, text.encode("latin-1")), out)
        assert (report.ok, report.failed) == (1, 1)
        letter = json.loads(out.with_name(f"{name}.out.errors.jsonl").read_text())
        assert hint in letter["message"] and letter["reason"] == "UnicodeDecodeError"


def test_a_lone_surrogate_in_a_name_is_not_shown(tmp_path: Path) -> None:
    source = written(tmp_path, "in.jsonl", b'{"na\\udcefve": "a"}\n')
    assert "they have na?ve;" in said(source, engine="headrace.testing:FakeEngine")


# -- folders that name columns ----------------------------------------------------------------------------------------


def hive(root: Path) -> Path:
    for place, rows in (("year=2024/city=K%C3%B6ln", 2), ("year=2025/city=__HIVE_DEFAULT_PARTITION__", 1)):
        (root / place).mkdir(parents=True)
        pq.write_table(pa.table({"text": ["a"] * rows}), root / place / "part.parquet")
    return root


COLUMNS = [{"year": 2024, "city": "Köln"}, {"year": 2024, "city": "Köln"}, {"year": 2025, "city": None}]


@pytest.mark.parametrize("given", ["", "*/*/*.parquet"])
def test_folders_give_their_columns(tmp_path: Path, given: str) -> None:
    source = hive(tmp_path / "in") / given
    run(source, tmp_path / "out.jsonl", keep_columns=["year", "city"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in ("year", "city")} for row in rows] == COLUMNS
    run(source, tmp_path / "other.parquet", keep_columns=["year", "city"])
    assert pq.read_table(tmp_path / "other.parquet", columns=["year", "city"]).to_pylist() == COLUMNS
    run(source, tmp_path / "third.jsonl", prompt_template="{year}: {text}")
    assert [json.loads(line)["output"] for line in (tmp_path / "third.jsonl").read_text().splitlines()] == [7, 7, 7]


def test_they_are_those_of_pyarrow(tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    root = hive(tmp_path / "in")
    assert dataset.dataset(root, partitioning="hive").to_table().select(["year", "city"]).to_pylist() == COLUMNS


def test_a_column_of_the_file_comes_first_and_text_formats_have_them_too(tmp_path: Path) -> None:
    (tmp_path / "in/lang=de").mkdir(parents=True)
    written(tmp_path / "in/lang=de", "a.jsonl", b'{"text": "a", "lang": "own"}\n{"text": "b"}\n')
    run(tmp_path / "in", tmp_path / "out.jsonl", keep_columns=["lang"])
    rows = [json.loads(line)["lang"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows == ["own", "de"]


def test_a_column_is_of_integers_only_if_all_are() -> None:
    root = Path("in")
    files = [root / place / "f" for place in ("a=1/b=01", "a=-2/b=2", "x=y=z", "plain", "=1")]
    assert partitions(files, root) == {
        files[0]: {"a": 1, "b": "01"},
        files[1]: {"a": -2, "b": "2"},
        files[2]: {"x": "y=z"},
    }


@pytest.mark.parametrize("given", ["year=2024", "year=2024/*/*.parquet", "year=2024/city=K%C3%B6ln/*.parquet"])
def test_the_folders_that_are_named_give_their_columns_too(tmp_path: Path, given: str) -> None:
    run(hive(tmp_path / "in") / given, tmp_path / "out.jsonl", keep_columns=["year", "city"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in ("year", "city")} for row in rows] == COLUMNS[:2]


def test_a_job_of_such_a_folder_is_resumed(tmp_path: Path) -> None:
    source = hive(tmp_path / "in")
    run(source, tmp_path / "out.jsonl", keep_columns=["year"])
    assert run(source, tmp_path / "out.jsonl", keep_columns=["year"]).skipped == 3


# -- empty texts ----------------------------------------------------------------------------------------------------


def test_an_empty_cell_is_told_and_can_be_refused(tmp_path: Path) -> None:
    source = written(tmp_path, "in.csv", b'id,text\n1,\n2,a\n3,""\n')
    report = run(source, tmp_path / "kept.jsonl")
    assert (report.ok, report.failed, report.empty) == (3, 0, 2)
    assert ("empty", '2 records with an empty text; on_empty="error" fails them') in rows_of(report)
    report = run(source, tmp_path / "refused.jsonl", on_empty="error")
    assert (report.ok, report.failed, report.empty) == (1, 2, 0)
    letters = map(json.loads, (tmp_path / "refused.errors.jsonl").read_text().splitlines())
    assert {letter["message"] for letter in letters} == {"the text of 'text' is empty (on_empty=\"error\")"}


def test_an_empty_text_of_a_pair_or_a_template(tmp_path: Path) -> None:
    from headrace.jobs.pipeline.inputs import Columns
    from headrace.records import Record

    pair = Columns("a", None, pair="b", on_empty="error")
    assert pair.input_of(Record(0, 0, {"a": "x", "b": "y"})) == ("x", "y")
    filled = Columns("", None, template="{a}{b}", on_empty="error")
    assert filled.input_of(Record(0, 0, {"a": "", "b": "y"})) == "y"
    for columns, row in ((pair, {"a": "x", "b": ""}), (filled, {"a": "", "b": ""})):
        with pytest.raises(ValueError, match="the text of 'a' and 'b' is empty"):
            columns.input_of(Record(0, 0, row))


def test_the_flag_of_the_command_line(tmp_path: Path) -> None:
    source = written(tmp_path, "in.csv", b"id,text\n1,\n2,a\n")
    flags = ["run", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--engine", "headrace.testing:FakeEngine"]
    said = command.headrace(*flags, "--on-empty", "error", folder=tmp_path)[1]
    assert "1 of 2 records, 1 failed" in said, said
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
