"""CSV and TSV as output: what a cell holds, and that any row comes back as it was."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import JobError
from headrace.io.base import Take
from headrace.io.formats.csv_writer import CsvWriter
from headrace.io.sources.opening import open_source
from headrace.records import Ok, Record

TEXTS = st.text(st.sampled_from(' ab,\t"\r\n\0é'), max_size=6)


def ok(number: object, output: object, **kept: object) -> Ok:
    return Ok(Record(0, number, kept), output, 1)


def read(content: bytes, delimiter: str = ",") -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode(), newline=""), delimiter=delimiter, strict=True))


def test_cells_hold_what_people_expect() -> None:
    writer = CsvWriter("vector", ["a", "b"])
    day = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
    rows = [
        ok("x", np.array([0.5, 2], np.float32), a=None, b=""),
        ok(7, {"label": "a, b", "score": 0.25}, a=True, b=day),
        ok(8, 'say "no"', a=math.nan, b=1.5),
        ok(9, None, a=" left", b="two\nlines"),
    ]
    assert writer.encode(rows).decode() == (
        "id,a,b,vector\n"
        'x,,"","[0.5,2.0]"\n'
        '7,true,2026-01-02T03:04:00+00:00,"{""label"":""a, b"",""score"":0.25}"\n'
        '8,,1.5,"say ""no"""\n'
        '9," left","two\nlines",\n'
    )
    assert writer.nulled == 1


def test_what_a_cell_cannot_hold_fails_its_row() -> None:
    writer = CsvWriter("v", ["a"], on_nan="error")
    for value in (b"bytes", "\ud800", math.inf, object()):
        with pytest.raises((TypeError, ValueError)):
            writer.encode([ok(1, "x", a=value)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), st.sampled_from(["csv", "tsv"]), st.sampled_from(["", ".gz"]))
def test_any_text_comes_back_merged_rearranged_or_interleaved(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]], kind: str, packing: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    suffix = f".{kind}{packing}"
    writer = CsvWriter("out", ["kept"], kind, packing)
    rows = [ok(number, out, kept=kept) for number, (kept, out) in enumerate(texts)]
    middle = len(rows) // 2
    parts = [folder / f"{number}{suffix}" for number in range(3)]
    for path, some in zip(parts, (rows[:middle], [], rows[middle:]), strict=True):
        path.write_bytes(writer.encode(some))
    merged = folder / f"merged{suffix}"
    with merged.open("wb") as file:
        writer.merge(parts, file)
    [whole] = writer.rearrange([parts], [Take([len(rows)], [range(len(rows))])])
    turned = folder / f"turned{suffix}"
    runs, counts = [parts[:1], parts[1:]], [middle, len(rows) - middle]
    turned.write_bytes(next(writer.rearrange(runs, [Take(counts, [list(range(len(rows)))[::-1]])])))
    both = folder / f"both{suffix}"
    with both.open("wb") as file:
        writer.interleave(merged, [turned], [(1, 1), (0, -1)] if len(rows) > 1 else [], file)
    wanted = [{"id": str(number), "kept": kept, "out": out} for number, (kept, out) in enumerate(texts)]
    (folder / f"whole{suffix}").write_bytes(whole)
    assert table(merged) == table(folder / f"whole{suffix}") == wanted
    assert table(turned) == wanted[::-1]
    more = wanted[-1:] if len(rows) > 1 else []
    assert table(both) == wanted[:1] + more + wanted[1:]


def table(path: Path) -> list[dict[str, object]]:
    return [dict(record.data) for chunk in open_source(path).chunks(lambda at: at) for record in chunk.records]


def test_an_output_without_rows_has_its_header() -> None:
    target = io.BytesIO()
    CsvWriter("out", ["kept"]).merge([], target)
    assert target.getvalue() == b"id,kept,out\n"


def test_parts_with_other_columns_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for path, keep in zip(paths, ([], ["a"]), strict=True):
        path.write_bytes(CsvWriter("out", keep).encode([ok(1, "x", a="y")]))
    with pytest.raises(JobError, match=r"1\.csv and 2\.csv have different columns.*overwrite=True"):
        CsvWriter("out", []).merge(paths, io.BytesIO())


def test_a_vector_of_many_numbers_is_json() -> None:
    vector = [random.Random(3).random() for _ in range(384)]
    [_, row] = read(CsvWriter("v", [], "tsv").encode([ok("a", vector)]), "\t")
    assert json.loads(row[1]) == vector
