from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, JobError, RecordError
from headrace.io.base import Chunk
from headrace.io.formats.dead_letters import encode_failures
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.sources.opening import open_source
from headrace.io.storage import files
from headrace.io.storage import rows as rows_module
from headrace.records import Failed, Ok, Record


def read(path: Path, next_todo: Callable[[int], int] = lambda position: position) -> list[Chunk]:
    return list(open_source(path).chunks(next_todo))


def rows(chunks: list[Chunk]) -> dict[int, Any]:
    found = {record.position: record.data for chunk in chunks for record in chunk.records}
    return found | {failed.record.position: failed.reason for chunk in chunks for failed in chunk.failures}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_blank_lines_take_no_position(file: Path) -> None:
    file.write_bytes(b'\n{"a":1}\n \t\r\n\n{"a":2}\r\n\n')
    assert rows(read(file)) == {0: {"a": 1}, 1: {"a": 2}}


def test_the_last_line_needs_no_newline_and_the_first_may_have_a_mark(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"a":1}\n{"a":2}')
    assert rows(read(file)) == {0: {"a": 1}, 1: {"a": 2}}


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"a":', "JSONDecodeError", "Expecting value"),
        (b'{"a":1} {"a":2}', "JSONDecodeError", "Extra data"),
        (b"[1]", "TypeError", "JSON list, not an object"),
        (b"null", "TypeError", "JSON NoneType"),
        (b'{"a":"\xff"}', "UnicodeDecodeError", "invalid start byte"),
        (b"[" * 100_000, "RecursionError", "recursion"),
        (b'{"a":' + b"9" * 5000 + b"}", "ValueError", "digits"),
        (b'\xef\xbb\xbf{"a":1}', "JSONDecodeError", ""),
    ],
)
def test_a_line_that_is_no_object_fails_alone_and_is_kept(file: Path, line: bytes, reason: str, message: str) -> None:
    file.write_bytes(b'{"a":0}\n' + line + b'\n{"a":2}\n')
    [chunk] = read(file)
    assert [record.position for record in chunk.records] == [0, 2]
    [failed] = chunk.failures
    assert (failed.record.position, failed.reason) == (1, reason)
    assert message in failed.message
    assert failed.record.data == line[: rows_module.RAW_KEPT_BYTES].decode(errors="replace")


lines = st.lists(st.sampled_from([b'{"k":1}', b"", b"  ", b"nope", b'{"long":"' + b"x" * 300 + b'"}']), max_size=60)


@pytest.mark.parametrize("start", [b"PAR1\x15\x04", b"ARROW1\0\0", b"\x1f\x8b\x08", b"BZh91AY&SY", b"PK\x03\x04"])
def test_a_file_of_another_format_is_refused(file: Path, start: bytes) -> None:
    file.write_bytes(start + b"\n" * 9)
    with pytest.raises(ConfigError, match=r"in\.jsonl is .*, not text; "):
        read(file)


@settings(deadline=None)  # a busy machine is no failure
@given(lines=lines, done=st.sets(st.integers(0, 60)), block=st.integers(1, 400), chunk_rows=st.integers(1, 7))
def test_any_blocks_and_any_done_rows_give_the_same_positions(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], done: set[int], block: int, chunk_rows: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(b"\n".join(lines))

    def next_todo(position: int) -> int:
        while position in done:
            position += 1
        return position

    full = [line for line in lines if line.strip()]
    expected = {
        position: json.loads(line) if line != b"nope" else "JSONDecodeError"
        for position, line in enumerate(full)
        if position not in done
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "BLOCK_BYTES", block)
        patch.setattr(rows_module, "CHUNK_ROWS", chunk_rows)
        chunks = read(file, next_todo)
    assert rows(chunks) == expected
    assert sum(chunk.bytes for chunk in chunks) == file.stat().st_size
    assert all(len(chunk.records) + len(chunk.failures) <= chunk_rows for chunk in chunks)


def test_done_rows_are_not_parsed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b'{"a":1}\n' * 1000)
    parsed = []
    monkeypatch.setattr(rows_module, "decode_json", lambda line: parsed.append(line) or {})
    source = open_source(file)
    parsed.clear()  # the first line is looked at to tell the format
    list(source.chunks(lambda position: max(position, 997)))
    assert len(parsed) == 3


def test_a_line_without_end_fails_in_bounded_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 100)
    file.write_bytes(b'{"a":"' + b"x" * 50_000 + b'"}\n{"a":2}\n')
    chunks = read(file)
    assert rows(chunks) == {0: "ValueError", 1: {"a": 2}}
    assert sum(chunk.bytes for chunk in chunks) == file.stat().st_size


@pytest.mark.parametrize("rows", [1, 20])
def test_an_input_that_changes_after_the_start_is_an_error(file: Path, rows: int) -> None:
    file.write_bytes(b'{"a":1}\n' * 10)
    source = open_source(file)
    file.write_bytes(b'{"a":1}\n' * rows)
    with pytest.raises(JobError, match=rf"in\.jsonl changed .*\(80 bytes then, {8 * rows} now\); .*kept"):
        list(source.chunks(lambda position: position))


def test_a_change_while_it_is_read_ends_it_before_the_last_rows_go_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 16)
    file.write_bytes(b'{"a":1}\n' * 10)
    chunks = open_source(file).chunks(lambda position: position)
    assert len(next(chunks).records) == 2
    content = bytearray(file.read_bytes())
    content[-3:-2] = b"2"
    file.write_bytes(content)
    with pytest.raises(JobError, match="another time or tag"):
        list(chunks)


def test_content_decides_the_description(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one.jsonl", tmp_path / "same.jsonl", tmp_path / "other.jsonl"
    one.write_bytes(b'{"a":1}\n')
    same.write_bytes(b'{"a":1}\n')
    other.write_bytes(b'{"a":2}\n')
    assert open_source(one).describe() == open_source(same).describe()
    assert open_source(one).describe() != open_source(other).describe()


def test_a_large_input_is_described_by_samples(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "WHOLE_DIGEST_BYTES", 100)
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    content = bytearray(b"x" * 5000)
    file.write_bytes(content)
    before = open_source(file).describe()
    content[-1:] = b"y"
    file.write_bytes(content)
    assert open_source(file).describe() != before


def test_a_file_that_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_source(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"holds no file of a known format; known: \.arrow"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match=r"not a regular file.*: pipe it to `-i -`"):
        open_source(Path("/dev/null"))


class Array:
    def tolist(self) -> list[float]:
        return [0.5, 1.0]


def test_rows_are_written_as_objects_and_arrays_as_lists() -> None:
    writer = JsonlWriter("embedding")
    encoded = writer.encode([Ok(Record(0, "ä", None), Array()), Ok(Record(1, 7, None), None)])
    assert encoded.decode() == '{"id":"ä","embedding":[0.5,1.0]}\n{"id":7,"embedding":null}\n'
    with pytest.raises(RecordError, match="a value of type set, which no format can hold; return a list"):
        writer.encode([Ok(Record(0, 0, None), set())])


def test_a_dead_letter_says_where_why_and_what() -> None:
    [line] = encode_failures(
        [Failed(Record(3, "x", {"text": None, "half": "\ud800"}), "RecordError", "null", 2)]
    ).splitlines()
    assert json.loads(line) == {
        "position": 3,
        "id": "x",
        "reason": "RecordError",
        "message": r"null (1 lone surrogate written as text: \uXXXX)",
        "attempts": 2,
        "record": {"text": None, "half": r"\ud800"},
    }
