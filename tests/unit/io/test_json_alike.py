"""Lines that are alike are read as `json.loads` reads them, or left to the parser."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.io.formats.json_alike import columns_of
from headrace.io.formats.json_tables import _lines_of

TYPES = {"id": pa.int64(), "text": pa.string()}
VALUES = {
    "id": st.integers(-(10**20), 10**20) | st.integers(-3, 3),
    "text": st.text("abc {}:,é[]0\n", max_size=6),
    "score": st.floats(allow_nan=False) | st.none() | st.booleans() | st.integers(0, 9),
    "b, c": st.text('a":{', max_size=3),
}
ODD = [b'"', b"\\", b"{", b"}", b":", b",", b"0", b"-", b"e", b" ", b"\n", b"\r", b"\0", b"\xff", b"\xc3", b"x"]


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    names = draw(st.permutations(list(VALUES)))[: draw(st.integers(1, len(VALUES)))]
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    rows = [{name: draw(VALUES[name]) for name in names} for _ in range(draw(st.integers(1, 4)))]
    text = "\n".join(json.dumps(row, separators=separators, ensure_ascii=False) for row in rows).encode()
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from([b"", *ODD])) + text[place + draw(st.integers(0, 1)) :]
    return text


def rows_of(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.decode()) for line in text.split(b"\n") if line.strip()]


@settings(max_examples=300)
@given(texts())
def test_what_is_read_is_what_json_loads_reads(text: bytes) -> None:
    lines = _lines_of(text)
    found = columns_of(lines, TYPES) if len(lines) else None
    if found is None:
        return
    rows = rows_of(text)
    assert all(type(row) is dict for row in rows)
    for name, kind in TYPES.items():
        wanted = [row.get(name) for row in rows]
        assert found[name].type == kind
        assert found[name].to_pylist() == wanted
        assert all(type(value) in (int, str, type(None)) for value in wanted)


@pytest.mark.parametrize("between", [',"text":"', ', "text": "', ', "score": -1.5e3, "on": true, "text": "'])
@pytest.mark.parametrize("end", ['"}', '", "more": 3}', '" }'])
def test_lines_that_are_alike_are_read(between: str, end: str) -> None:
    said = [f"é{{}}, : {number}" * (number % 3) for number in range(30)]
    text = "\n".join(f'{{"id": {number * 7 - 50}{between}{one}{end}' for number, one in enumerate(said)).encode()
    found = columns_of(_lines_of(text), TYPES)
    assert found is not None
    assert found["id"].to_pylist() == [number * 7 - 50 for number in range(30)]
    assert found["text"].to_pylist() == said


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": 1, "text": "a\\nb"}',
        b'{"id": 01, "text": "a"}',
        b'{"id": +1, "text": "a"}',
        b'{"id": 0x1, "text": "a"}',
        b'{"id": 1.0, "text": "a"}',
        b'{"id": 99999999999999999999, "text": "a"}',
        b'{"id": "1", "text": "a"}',
        b'{"id": 1, "text": "a\tb"}',
        b'{"id": 1, "text": "a\xff"}',
        b'{"id": 1, "text": null}',
        b'{"id": 1, "text": "a"},',
        b'{"id": 1, "test": "a"}',
        b'{"id": 1, "text" : "a"}',
        b'{"id": 1, "text": "a", "text": "b"}',
    ],
)
def test_a_line_that_differs_is_left_to_the_parser(line: bytes) -> None:
    good = [b'{"id": 1, "text": "a"}'] * 3
    for lines in ([*good, line, *good], [line, *good], [*good, line]):
        assert columns_of(_lines_of(b"\n".join(lines)), TYPES) is None
