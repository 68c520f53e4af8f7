"""A quote that is not closed costs its own row, and says where it is; every other row is read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.acceptance.command import FAKE as ENGINE
from tests.acceptance.command import PROGRAM, ROOT
from tests.examples import examples

import headrace
from headrace.errors import ConfigError
from headrace.io.formats import delimited
from headrace.io.sources.opening import open_source
from headrace.io.storage.compression import compress
from headrace.jobs.settings import Limits
from headrace.records import Failed

FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False}


def outcomes(path: Path, done: frozenset[int] = frozenset()) -> list[Any]:
    """What each position holds, a record's data or the whole failure; None where it was done."""

    def next_todo(position: int) -> int:
        while position in done:
            position += 1
        return position

    found: dict[int, Any] = {}
    for chunk in open_source(path).chunks(next_todo):
        found |= {record.position: record.data for record in chunk.records}
        found |= {failed.record.position: failed for failed in chunk.failures}
    return [found.get(position) for position in range(max(found, default=-1) + 1)]


def texts(found: list[Any]) -> list[Any]:
    return [None if isinstance(row, Failed) else row["text"] for row in found]


def write(path: Path, content: str) -> Path:
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.csv.gz"])
def test_an_unclosed_quote_costs_one_row_and_names_its_bytes(tmp_path: Path, name: str) -> None:
    end = "\t" if ".tsv" in name else ","
    lines = [f"{n}{end}text {n}\n" for n in range(3000)]
    lines[1000] = f'1000{end}"never closed\n'
    content = f"id{end}text\n" + "".join(lines)
    found = outcomes(write(tmp_path / name, content))
    assert len(found) == 3000
    assert texts(found) == [f"text {n}" if n != 1000 else None for n in range(3000)]
    data = found[1000].record.data
    assert data["text"] == lines[1000]
    assert data["file"] == str(tmp_path / name)
    assert data["lines"] == [1002, 1002]
    assert content[slice(*data["bytes"])] == lines[1000]
    assert found[1000].message == "a quoted field is never closed; line 1002 cannot be read"


def test_the_lines_up_to_the_next_whole_row_are_one_dead_letter(tmp_path: Path) -> None:
    content = 'id,text\n1,one\n2,"two\nof, ""three""\n\nlines"\n3,"a\nb, ""c""\n"d" is not doubled\nend"\n'
    content += '4,"four\nlines"\n5,5\n'
    found = outcomes(write(tmp_path / "in.csv", content))
    assert texts(found) == ["one", 'two\nof, "three"\n\nlines', None, "four\nlines", "5"]
    assert found[2].record.data["text"] == '3,"a\nb, ""c""\n"d" is not doubled\nend"\n'
    assert found[2].record.data["lines"] == [7, 10]
    assert found[2].message.endswith("4 lines, from 7 on, cannot be read")


def test_a_row_of_several_lines_and_the_wrong_width_is_not_read_as_others(tmp_path: Path) -> None:
    content = 'id,text\n1,"Dear Bob,\nthanks, and bye\nAnn",more\n2,two\n'
    found = outcomes(write(tmp_path / "in.csv", content))
    assert texts(found) == [None, "two"]
    assert found[0].record.data == ["1", "Dear Bob,\nthanks, and bye\nAnn", "more"]


def test_rows_hidden_by_a_quote_that_closes_by_chance_are_read(tmp_path: Path) -> None:
    content = 'id,text\n1,"open\n2,two\n3,three\n4,", and so on"\n5,five\n'
    found = outcomes(write(tmp_path / "in.csv", content))
    assert texts(found) == [None, "two", "three", ", and so on", "five"]
    assert found[0].record.data["text"] == '1,"open\n'


def test_long_fields_of_many_lines_are_read(tmp_path: Path) -> None:
    text = "\n".join(f'line {n}, with "quotes"' for n in range(20_000))
    stream = io.StringIO()
    csv.writer(stream).writerows([["id", "text"], ["1", text], ["2", "two"]])
    assert texts(outcomes(write(tmp_path / "in.csv", stream.getvalue()))) == [text, "two"]


def test_what_is_read_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_LINE_BYTES", 10_000)
    lines = "".join(f"{n},text {n}\n" for n in range(5000))
    found = outcomes(write(tmp_path / "in.csv", f'id,text\nx,"open\n{lines}'))
    assert texts(found) == [None, *(f"text {n}" for n in range(5000))]
    assert "is longer than 10000 bytes" in found[0].message


def test_many_unclosed_quotes_take_time_by_the_length_of_the_file_alone(tmp_path: Path) -> None:
    """Read line by line to the end of the file for each of them, this would take hours."""
    found = outcomes(write(tmp_path / "in.csv", "id,text\n" + 'x","y\n1,2\n' * 20_000))
    assert texts([row for row in found if not isinstance(row, Failed)]) == ["2"] * 20_000


def test_a_header_whose_quote_is_not_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the header line of .*in\.csv"):
        outcomes(write(tmp_path / "in.csv", 'id,"text\n1,2\n'))
    content = "\n\n" + ",".join(f'"column {n}"' for n in range(200)) + "\n"
    assert outcomes(write(tmp_path / "in.csv", content)) == []


def test_a_job_over_broken_quotes_resumes_to_the_same_output(tmp_path: Path) -> None:
    rows = [f"{n},text {n}\n" if n % 50 else f'{n},"open {n}\n' for n in range(1000)]
    source = write(tmp_path / "in.csv", "id,text\n" + "".join(rows))
    sink, limits = tmp_path / "out", Limits(part_records=50)
    headrace.run(source, sink=f"{sink}/", limits=limits, **FAKE)
    whole = {path.name: path.read_bytes() for path in sink.glob("part-*.jsonl")}
    errors = (sink / "_headrace" / "errors.jsonl").read_text().splitlines()
    assert len(errors) == 20
    assert json.loads(errors[3])["record"]["text"] == '150,"open 150\n'
    parts = sorted(whole)
    for name in (parts[2], parts[7]):
        (sink / name).unlink()
    headrace.run(source, sink=f"{sink}/", limits=limits, **FAKE)
    ids = [json.loads(line)["id"] for path in sink.glob("part-*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(ids, key=int) == [str(n) for n in range(1000) if n % 50]


def test_from_stdin_compressed(tmp_path: Path) -> None:
    content = compress(".zst", b'id,text\n1,one\n2,"open\n3,three\n')
    flags = ["-i", "-", "--input-format", "csv.zst", "-o", "out.jsonl", *ENGINE]
    path = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*PROGRAM, "run", *flags],
        input=content,
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["1", "3"]


FIELD = st.text(alphabet='ab,"\n\t ', max_size=8)


@given(
    rows=st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=12),
    delimiter=st.sampled_from(",\t"),
    where=st.integers(0, 11),
    column=st.integers(0, 2),
    done=st.frozensets(st.integers(0, 12)),
)
@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_but_the_broken_one_is_read(
    tmp_path: Path,
    rows: list[tuple[str, str, str]],
    delimiter: str,
    where: int,
    column: int,
    done: frozenset[int],
) -> None:
    """The quote behind a field is taken away, or one is put before it; all other rows are read as they are."""
    where %= len(rows)
    lines = [written(row, delimiter) for row in rows]
    fields = ["x", "x", "x"]
    fields[column] = written([rows[where][column]], delimiter)[:-1]
    if fields[column].startswith('"'):
        fields[column] = fields[column][:-1]
    else:
        fields[column] = '"' + fields[column]
    lines[where] = delimiter.join(fields) + "\n"
    content = f"a{delimiter}b{delimiter}c\n" + "".join(lines)
    path = write(tmp_path / ("in.csv" if delimiter == "," else "in.tsv"), content)
    assume(is_broken("".join(lines[where:]), delimiter))
    found = outcomes(path)
    expected = [dict(zip("abc", row, strict=True)) for row in rows]
    assert found[:where] == expected[:where]
    behind = expected[where + 1 :]
    assert not behind or found[-len(behind) :] == behind
    bad = [row for row in found[where : len(found) - len(behind)] if isinstance(row, Failed)]
    assert bad
    for failed in bad:
        if isinstance(failed.record.data, dict):
            assert content[slice(*failed.record.data["bytes"])] == failed.record.data["text"]
    again = outcomes(path, done)
    assert [row for position, row in enumerate(found) if position not in done] == [
        row for position, row in enumerate(again) if position not in done
    ]


def written(row: Any, delimiter: str) -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_MINIMAL).writerow(row)
    return stream.getvalue()


def is_broken(content: str, delimiter: str) -> bool:
    """Whether the first row can be seen to be none, though it may be several lines long."""
    try:
        row = next(csv.reader(io.StringIO(content), delimiter=delimiter, strict=True))
    except csv.Error:
        return True
    return len(row) != 3


def test_a_carriage_return_that_ends_a_line_alone_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_bytes(b"id,text\r1,a\r2,b\r")
    with pytest.raises(ConfigError, match=r"carriage return alone; convert the file first: tr '\\r' '\\n'"):
        headrace.run(tmp_path / "old.csv", sink=tmp_path / "out.jsonl", **FAKE)
    (tmp_path / "mixed.csv").write_bytes(b"id,text\n1,a\r2,b\n3,c\n4,d\n")
    report = headrace.run(tmp_path / "mixed.csv", sink=tmp_path / "mixed.jsonl", **FAKE)
    assert report.failed == 1
    assert "carriage return alone" in report.failed_records[0].message
