from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.in_columns import compared, in_tables, skipping

from headrace.errors import ConfigError, JobError
from headrace.io.base import ColumnSource
from headrace.io.formats import csv_tables
from headrace.io.sources.opening import open_source
from headrace.io.storage import rows as rows_module

NAMES = ("id", "text", "missing")
GOOD = b'1,"a, ""b""\nc",x\n'
HEADER = b"id,text,n\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.csv"


def test_a_file_is_a_few_tables_of_thousands_of_rows(file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["id", "text"])
        writer.writerows((n, f'text "{n}",\r\n more' if n % 3 else "") for n in range(20_000))
    chunks = compared(open_source(file), NAMES)
    assert [in_tables(chunks, name) for name in NAMES] == [20_000, 20_000, 0]
    assert len(chunks) <= 5


@pytest.mark.parametrize(
    "line",
    [
        b"1,2",
        b"1,2,3,4",
        b"",
        b"\r",
        b" ",
        b'"\xff",b,c',
        b'"a\n\xff",b,c',
        b"\xef\xbb\xbf1,b,c",
        b'"",NA,null',
        b'"a\rb",b,c\r',
    ],
)
@pytest.mark.parametrize("number", [0, 10, 19])
def test_an_odd_row_leaves_the_others_in_columns(file: Path, line: bytes, number: int) -> None:
    file.write_bytes(HEADER + GOOD * number + line + b"\n" + GOOD * (19 - number))
    assert in_tables(compared(open_source(file), NAMES), "text") >= 19 - (line.startswith(b"\xef") and not number) * 19


@pytest.mark.parametrize(
    "line",
    [
        b'a"b,c,d',
        b'"a"b,c,d',
        b'"a" ,b,c',
        b' "a",b,c',
        b'"open,b,c',
        b"a\rb,c,d",
        b"a\0,b,c",
        b'"a\nb",c',
        b'"' + b"x" * 99,
    ],
)
@pytest.mark.parametrize("number", [0, 10, 19])
def test_from_a_row_with_wrong_quotes_on_rows_are_read_one_by_one(file: Path, line: bytes, number: int) -> None:
    file.write_bytes(HEADER + GOOD * number + line + b"\n" + GOOD * (19 - number))
    assert in_tables(compared(open_source(file), NAMES), "text") == number
    compared(open_source(file), NAMES, skipping({0, 1, 9, 10, 11, 18}))


def test_a_very_long_row_is_read_as_a_row(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_tables, "LONGEST_ROW", 100)
    monkeypatch.setattr(csv_tables, "TABLE_BYTES", 1)
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 50)
    file.write_bytes(HEADER + GOOD * 10 + b'1,"' + b"x\n" * 100 + b'",3\n' + GOOD * 10)
    assert in_tables(compared(open_source(file), NAMES), "text") == 10


@pytest.mark.parametrize("header", [b"id,id\n", b"\xff,text\n", b'"id,text\n'])
def test_a_wrong_header_is_refused_as_by_rows(file: Path, header: bytes) -> None:
    file.write_bytes(header + b"1,2\n")
    source = open_source(file)
    assert isinstance(source, ColumnSource)
    with pytest.raises(ConfigError) as by_rows:
        list(source.chunks(lambda position: position))
    with pytest.raises(ConfigError) as in_columns:
        list(source.in_columns(NAMES).chunks(lambda position: position))
    assert str(in_columns.value) == str(by_rows.value)


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"id", b"id,text\n", b"\r\nid,text\r\n\r\n1,2\r\n\r\n", b"id\n\n1\n\n2"]
)
def test_files_with_few_rows(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    compared(open_source(file), NAMES)


def test_compressed_and_partitioned_files(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "in.tsv.gz").write_bytes(gzip.compress(b"id\ttext\n" + b'1\t"a\tb"\n' * 100))
    (tmp_path / "year=2025").mkdir()
    (tmp_path / "year=2025" / "in.csv").write_bytes(b"id,year\n" + b"1,own\n" * 100)
    chunks = compared(open_source(tmp_path), ["id", "text", "year"])
    assert [in_tables(chunks, name) for name in ("id", "text", "year")] == [200, 100, 100]


FIELDS = ["a", "", '"q"', '"a,b"', '"a\nb"', '"a\r\nb"', '"a""b"', '""', '""""', "NA", " x", "é", "\ufeff"]
ODD = ['a"b', '"a"b', '"open', '"', "a\rb", "\r", "\0", ' "a"', '"a" ', '""a', "a,b", "\n"]


@settings(deadline=None, max_examples=examples(300))
@given(
    rows=st.lists(
        st.lists(st.sampled_from(FIELDS), min_size=2, max_size=2) | st.lists(st.sampled_from(FIELDS + ODD), max_size=4),
        max_size=30,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    is_ended=st.booleans(),
    done=st.sets(st.integers(0, 40)),
    sizes=st.sampled_from([(1, 16, 1), (100, 64, 7), (1024, 4096, 8192)]),
)
def test_any_rows_are_read_as_alone(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[str]],
    end: str,
    is_ended: bool,
    done: set[int],
    sizes: tuple[int, int, int],
) -> None:
    file = tmp_path_factory.mktemp("any") / "in.csv"
    file.write_text("id,text" + end + end.join(map(",".join, rows)) + end * is_ended, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_tables, "TABLE_BYTES", sizes[0])
        patch.setattr(rows_module, "BLOCK_BYTES", sizes[1])
        patch.setattr(csv_tables, "TABLE_ROWS", sizes[2])
        compared(open_source(file), NAMES, skipping(done))


def test_the_rows_before_damage_are_read_one_by_one_too(tmp_path: Path) -> None:
    name = tmp_path / "in.csv.gz"
    name.write_bytes(gzip.compress(HEADER + b"".join(b"%d,%d,x\n" % (n, n * n) for n in range(400)))[:-20])
    found: list[object] = []
    with pytest.raises(JobError, match="truncated"):
        found.extend(row.data["id"] for chunk in open_source(name).chunks(lambda place: place) for row in chunk.records)
    assert found == [str(n) for n in range(len(found))] and len(found) > 300
