from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.in_columns import compared, in_tables, skipping

from headrace.errors import JobError
from headrace.io.base import Chunk, ColumnSource
from headrace.io.formats import json_tables
from headrace.io.sources.opening import open_source
from headrace.io.storage import rows as rows_module

NAMES = ("id", "text", "more")
GOOD = b'{"id": 1, "text": "a", "more": 1.5}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def lines_of(count: int) -> bytes:
    return b"".join(b'{"id": "%d", "text": "text %d", "more": %d}\n' % (n, n, n) for n in range(count))


def table_values(chunks: list[Chunk], name: str) -> list[Any]:
    found: list[Any] = []
    for chunk in chunks:
        assert chunk.table is not None
        column = chunk.table.column(name)
        assert column is not None
        found += column.to_pylist()
    return found


def test_a_file_is_a_few_tables_of_thousands_of_rows(file: Path) -> None:
    file.write_bytes(lines_of(30_000))
    chunks = compared(open_source(file), NAMES)
    assert table_values(chunks, "text") == [f"text {n}" for n in range(30_000)]
    assert table_values(chunks, "id") == [str(n) for n in range(30_000)]
    assert table_values(chunks, "more") == list(range(30_000))
    assert len(chunks) <= 5
    assert max(len(chunk.records) for chunk in chunks) <= json_tables.TABLE_ROWS


HOSTILE = [
    b'{"id": 1, "id": 2, "text": "doubled"}',
    b'{"id": 1, "text": "doubled", "te\\u0078t": "escaped"}',
    b'{"\\u0069d": 1, "text": "escaped"}',
    b'{"id": 1, "text": "other", "x": 1, "x": 2}',
    b'{"id": 1, "text": "\\ud800"}',
    b'{"id": 1, "text": "\\udc00\\ud800"}',
    b'{"id": 1, "text": "\\ud83d\\ude00"}',
    b'{"id": 1, "text": "t", "x": "\\ud800"}',
    b'{"id": 1, "text": "t", "\\udc00": 1}',
    b'{"id": 1, "text": "a\\u0000b"}',
    b'{"id": 1, "text": "2020-01-01T00:00:00"}',
    b'{"id": 9223372036854775808, "text": "t"}',
    b'{"id": -9223372036854775808, "text": "t"}',
    b'{"id": -0, "text": "t", "more": -0.0}',
    b'{"id": 1, "text": "t", "more": -0}',
    b'{"id": 1, "text": "t", "more": 1}',
    b'{"id": 1, "text": "t", "more": 1.0}',
    b'{"id": 1, "text": "t", "more": 1e3}',
    b'{"id": 1, "text": "t", "more": 1e400}',
    b'{"id": 1, "text": "t", "x": 1e400}',
    b'{"id": 1, "text": "t", "more": NaN}',
    b'{"id": 1, "text": "t", "x": [NaN, Infinity, -Infinity]}',
    b'{"id": 1, "text": "t", "x": Inf}',
    b'{"id": 1, "text": "t", "x": [-Inf]}',
    b'{"id": 1, "text": "t", "x": [Inf ]}',
    b'{"id": 1, "text": "t", "x": -NaN}',
    b'{"id": 1, "text": "t", "x": ' + b"9" * 4300 + b"}",
    b'{"id": 1, "text": "t", "x": ' + b"9" * 4301 + b"}",
    b'{"id": 1, "text": "t", "x": "' + b"9" * 9000 + b'"}',
    b'{"id": 1, "text": "t", "x": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"id": 1, "text": "t", "x": ' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
    b'{"id": 1, "text": "t", "x": ' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"id": true, "text": "t"}',
    b'{"id": null, "text": null}',
    b'{"id": "1", "text": 1}',
    b'{"id": 1, "text": {"text": "inner"}}',
    b'{"id": 1, "text": ["t"]}',
    b'{"x": {"id": 5, "text": "inner"}}',
    b"{}",
    b' {"id": 1, "text": "blanks"} \t\r',
    b'\x0b{"id": 1}',
    b'{"id": 1}\x0b',
    b"\x0b",
    b'{"id": 1, "text": "t"} {"id": 2, "text": "u"}',
    b'{"id": 1, "text": "t"}{"id": 2, "text": "u"',
    b'{"id": 1, "text": "t"}\0{"id": 2, "text": "u"}',
    b'{"id": 1}\0}',
    b'{"id": 1, "text": "t",}',
    b'{"id": 1, "text": "t"} // comment',
    b'{"id": 1, "text": "t" /* comment */}',
    b"{'id': 1}",
    b'{"id": 01}',
    b'{"id": 1, "x": 1.}',
    b'{"id": 1, "x": +1}',
    b'{"id": 1, "x": "\\x"}',
    b'{"id": 1, "x": "\t"}',
    b'{"id": 1, "x": "\xff"}',
    b'{"id": 1, "text": "\xed\xa0\x80"}',
    b'{"id": 1, "text": "\xc0\x80"}',
    b'\xef\xbb\xbf{"id": 1}',
    b"[1]",
    b"null",
    b'"text"',
    b'{"id": 1,',
    b'"text": "t"}',
    b"}",
    b"{",
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:40]))
@pytest.mark.parametrize("number", [0, 20, 39])
def test_a_hostile_line_is_read_as_alone(file: Path, line: bytes, number: int) -> None:
    file.write_bytes(GOOD * number + line + b"\n" + GOOD * (39 - number))
    chunks = compared(open_source(file), NAMES)
    assert in_tables(chunks, "text") >= 39
    assert in_tables(chunks, "id") >= 39


def test_all_hostile_lines_together(file: Path) -> None:
    file.write_bytes(b"\n".join(HOSTILE))
    compared(open_source(file), NAMES)
    file.write_bytes(b"\r\n".join(HOSTILE * 2) + b"\r\n\r\n")
    compared(open_source(file), NAMES)


def test_a_line_that_ends_in_the_next_one(file: Path) -> None:
    file.write_bytes(GOOD + b'{"id": 1}{"id": 2\n, "x": {}}\n' + GOOD)
    assert sum(len(chunk.failures) for chunk in compared(open_source(file), NAMES)) == 2


def test_a_column_with_values_of_several_kinds_is_in_no_table_and_the_others_are(file: Path) -> None:
    lines = [{"id": n, "text": str(n), "more": [1, "1", None][n % 3]} for n in range(1000)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chunks = compared(open_source(file), NAMES)
    assert [in_tables(chunks, name) for name in NAMES] == [1000, 1000, 0]
    chunks = compared(open_source(file), ["more"])
    assert in_tables(chunks, "more") == 0


def test_a_column_whose_kind_changes_is_in_the_tables_of_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_tables, "TABLE_BYTES", 1)
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 4096)
    file.write_bytes(GOOD * 1000 + GOOD.replace(b"1,", b'"1",') * 1000 + GOOD.replace(b"1,", b"null,") * 1000)
    chunks = compared(open_source(file), NAMES)
    assert in_tables(chunks, "id") > 2500


def test_integers_among_floats_are_no_floats(file: Path) -> None:
    file.write_bytes(GOOD * 50 + GOOD.replace(b"1.5", b"2"))
    assert in_tables(compared(open_source(file), NAMES), "more") == 0
    file.write_bytes(GOOD * 50 + GOOD.replace(b"1.5", b"2.0"))
    assert in_tables(compared(open_source(file), NAMES), "more") == 51


def test_finished_rows_are_neither_parsed_nor_given(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"no JSON\n" * 3 + GOOD * 3 + b"no JSON\n\n" + GOOD * 3)
    for done in ({0, 1, 2}, {0, 1, 2, 6}, {3, 8}, set(range(10)), {9}, {0, 2, 4, 6, 8}):
        compared(open_source(file), NAMES, skipping(done))
    monkeypatch.setattr(json_tables, "TABLE_ROWS", 2)
    for done in ({0, 1, 2}, {3, 8}, set(range(10)), {0, 2, 4, 6, 8}):
        compared(open_source(file), NAMES, skipping(done))


def test_a_run_of_rows_is_asked_for_once(file: Path) -> None:
    file.write_bytes(GOOD * 5000)
    asked: list[int] = []

    class Todo:
        def __call__(self, position: int) -> int:
            asked.append(position)
            return 100 if 50 <= position < 100 else position

        def next_done(self, position: int) -> int:
            return 50 if position < 50 else sys.maxsize

    source = open_source(file)
    assert isinstance(source, ColumnSource)
    records = [record for chunk in source.in_columns(NAMES).chunks(Todo()) for record in chunk.records]
    assert [record.position for record in records] == [*range(50), *range(100, 5000)]
    assert len(asked) < 10


@pytest.mark.parametrize("block", [5, 7, 64, 1000])
@pytest.mark.parametrize("table", [1, 100, 5000])
def test_lines_may_be_cut_anywhere(file: Path, monkeypatch: pytest.MonkeyPatch, block: int, table: int) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", block)
    monkeypatch.setattr(json_tables, "TABLE_BYTES", table)
    file.write_bytes(
        b"\xef\xbb\xbf" + GOOD * 20 + b"\n\nno JSON\n" + GOOD * 20 + b'{"id": 5, "text": "' + b"x" * 3000 + b'"}'
    )
    assert in_tables(compared(open_source(file), NAMES), "text") == 41


def test_a_line_that_is_too_long_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows_module, json_tables):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 100)
    file.write_bytes(GOOD * 20 + b'{"id": 5, "text": "' + b"x" * 3000 + b'"}\n' + GOOD * 20)
    chunks = compared(open_source(file), NAMES)
    assert in_tables(chunks, "text") == 40
    assert [failed.record.position for chunk in chunks for failed in chunk.failures] == [20]


def test_compressed_files(tmp_path: Path) -> None:
    name = tmp_path / "in.jsonl.gz"
    name.write_bytes(gzip.compress(lines_of(9000)) + gzip.compress(b"no JSON\n" + lines_of(9000)))
    assert in_tables(compared(open_source(name), NAMES), "text") == 18_000


def test_the_rows_before_damage_are_read(tmp_path: Path) -> None:
    name = tmp_path / "in.jsonl.gz"
    name.write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(50_000)), 1)[:-30])
    source = open_source(name)
    assert isinstance(source, ColumnSource)

    def positions(chunks: Iterator[Chunk]) -> list[int]:
        found: list[int] = []
        with pytest.raises(JobError, match="truncated"):
            found.extend(record.position for chunk in chunks for record in chunk.records)
        return found

    read = positions(source.in_columns(NAMES).chunks(lambda position: position))
    assert read == positions(source.chunks(lambda position: position))
    assert read


def test_columns_of_folders(tmp_path: Path) -> None:
    for year, lines in {
        "2024": b'{"text": "a"}\n{"text": "b"}\n',
        "2025": b'{"text": "a", "year": 1}\n{"text": "b"}\n',
        "2026": b'{"text": "a", "year": null}\n{"text": "b"}\n',
    }.items():
        (tmp_path / f"year={year}").mkdir()
        (tmp_path / f"year={year}" / "in.jsonl").write_bytes(lines)
    chunks = compared(open_source(tmp_path), ["text", "year"])
    assert [in_tables(chunks, name) for name in ("text", "year")] == [6, 2]


def test_without_arrow_the_rows_are_read_one_by_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(GOOD * 3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert [chunk.table for chunk in compared(open_source(file), NAMES)] == [None]


ATOMS = [
    *("{", "}", "[", "]", ":", ",", '"a"', '"id"', '"text"', '"x"', "1", "0", "-0", "1.0", "1e3", "1e400", "NaN"),
    *("Infinity", "-Infinity", "Inf", "-Inf", "-NaN", "null", "true", "nul", " ", "\t", "\r", "\n", '"', "\\"),
    *("\\u0000", "\\ud800", "\0", "\x0b", "\x7f", "é", "\u2028", "9" * 4301, "//", "/*", "'", ".", "-", "+", "01"),
    *("e5", "[" * 600, "]" * 600, '{"id": 1}', '{"text": "t"}', '{"id": 1, "text": "t"}', '"id": 1', '"text": "t"'),
    *('"\\u0069d": 2', "{}", '"x": ', ": 1"),
]  # fmt: skip
VALUES = [
    "1",
    '"1"',
    "null",
    "1.5",
    "2.0",
    "true",
    "[1]",
    "{}",
    "NaN",
    "-0",
    "9" * 20,
    '"\\ud800"',
    '"é"',
    "Inf",
    '"Inf,"',
]
OBJECTS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(
    lambda row: "{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}"
)


@settings(deadline=None, max_examples=examples(300))
@given(
    lines=st.lists(OBJECTS | st.lists(st.sampled_from(ATOMS), max_size=8).map("".join), max_size=30),
    end=st.sampled_from(["", "\n", "\r\n", "\n\n"]),
    done=st.sets(st.integers(0, 40)),
    most=st.sampled_from([1, 5, 8192]),
)
def test_any_lines_are_read_as_alone(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, done: set[int], most: int
) -> None:
    file = tmp_path_factory.mktemp("any") / "in.jsonl"
    # The first line keeps the file from being taken for another kind.
    file.write_text('{"id": 1}\n' + (end or "\n").join(lines) + end, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_tables, "TABLE_ROWS", most)
        compared(open_source(file), NAMES, skipping(done))
