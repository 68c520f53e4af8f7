from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, RecordError
from headrace.io.base import Source
from headrace.io.sources.opening import open_source
from headrace.jobs.pipeline.inputs import Columns, id_text
from headrace.jobs.planning.columns import resolve
from headrace.records import Record


def source(path: Path, *rows: Any) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(path, "jsonl")


def test_id_is_the_id_column_where_there_is_one(tmp_path: Path) -> None:
    assert resolve(source(tmp_path / "a", {"text": "x", "id": 1}), Columns("text", None)) == Columns("text", "id")
    assert resolve(source(tmp_path / "b", {"text": "x"}), Columns("text", None)) == Columns("text", None)
    assert resolve(source(tmp_path / "c", {"text": "x", "id": 1, "k": 2}), Columns("text", "k")) == Columns("text", "k")


@pytest.mark.parametrize(("text", "id_column", "missing"), [("body", None, "body"), ("text", "key", "key")])
def test_a_column_no_record_has_is_refused_with_those_they_have(
    tmp_path: Path, text: str, id_column: str | None, missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{missing}'; they have text, id"):
        resolve(source(tmp_path / "a", {"text": "x"}, {"id": 1}), Columns(text, id_column))


def test_an_input_without_records_has_no_column_to_miss(tmp_path: Path) -> None:
    assert resolve(source(tmp_path / "a"), Columns("text", "id")) == Columns("text", "id")
    assert resolve(source(tmp_path / "b", [1], 2), Columns("text", None)) == Columns("text", None)


@pytest.mark.parametrize(
    ("value", "why"),
    [(None, "null"), (3, "of type int"), (["a"], "of type list"), ("\ud800", "not valid Unicode")],
)
def test_text_that_is_not_text_fails_its_record(value: Any, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        Columns("text", None).input_of(Record(0, 0, {"text": value}))


def test_a_record_without_the_column_fails_alone() -> None:
    with pytest.raises(RecordError, match="no column 'text'"):
        Columns("text", None).input_of(Record(0, 0, {}))
    with pytest.raises(RecordError, match="no column 'id'"):
        Columns("text", "id").identify(Record(0, 0, {}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is null"),
        (1.5, "is 1.5, of type float; an id is an integer or text: .*; pandas makes floats of integers if some are"),
        (True, "is True, of type bool; an id is an integer or text: convert the column"),
        ({}, "of type dict"),
        ("\udfff", "not valid Unicode"),
        pytest.param(10**5_000, "is an integer of 16,610 bits, too long to be written", id="long"),
    ],
)
def test_an_id_is_text_or_an_integer(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"column 'id' .*{message}"):
        Columns("text", "id").identify(Record(0, 0, {"id": value}))
    assert id_text(value) is None
    assert id_text(7) == id_text("7") == "7"
    assert Columns("text", "id").identify(Record(4, 4, {"id": "ä"})).id == "ä"
    assert Columns("text", "id").identify(Record(4, 4, {"id": 7})).id == 7


def test_a_pair_is_two_columns_and_each_must_be_text(tmp_path: Path) -> None:
    pair = Columns("text", None, pair="other")
    assert resolve(source(tmp_path / "a", {"text": "x", "other": "y"}), pair) == pair
    with pytest.raises(ConfigError, match="has a column 'other'"):
        resolve(source(tmp_path / "b", {"text": "x"}), pair)
    assert pair.input_of(Record(0, 0, {"text": "x", "other": "y"})) == ("x", "y")
    with pytest.raises(RecordError, match="'other' is null"):
        pair.input_of(Record(0, 0, {"text": "x", "other": None}))


@pytest.mark.parametrize("rows", [1_000, 5_000])
def test_a_column_to_keep_may_come_late(rows: int) -> None:
    source = open_source([{"text": "a"}] * rows + [{"text": "b", "v": 1}])
    assert resolve(source, Columns("text", None, keep=("v",))).keep == ("v",)


def test_a_column_to_keep_that_no_record_has_is_refused() -> None:
    source = open_source([{"text": "a"}] * 3_000)
    with pytest.raises(ConfigError, match=r"among the first 3,000 has a column 'v'; they have text"):
        resolve(source, Columns("text", None, keep=("v",)))


def filled(template: str, **data: Any) -> Any:
    return Columns("text", None, template=template).input_of(Record(0, 0, data))


def test_a_template_takes_texts_as_they_are_and_other_values_as_json() -> None:
    assert filled("Q: {q} {{{n}}} {l}", q="why?", n=1.5, l=["ä", None]) == 'Q: why? {1.5} ["ä", null]'


def test_a_value_that_a_template_cannot_hold_fails_its_record() -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    for value, why in ((None, "column 'q' is null"), (holds_itself, "cannot be written into a text")):
        with pytest.raises(RecordError, match=why):
            filled("{q}", q=value)
    with pytest.raises(RecordError, match="no column 'q'"):
        filled("{q}", p="x")
