"""What cannot be used is refused with the way that works, which is then taken."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import ConfigError, TooManyErrorsError


def count(batch: list[object]) -> list[int]:
    return [1] * len(batch)


async def awaited(batch: list[object]) -> list[int]:
    return [1] * len(batch)


def run(source: object, folder: Path, **options: Any) -> Any:
    options = {"engine": count, "progress": False, "overwrite": True, "sink": folder / "out.jsonl", **options}
    return headrace.run(source, **options)


@pytest.mark.parametrize(
    ("rows", "way_out"),
    [
        ([("a", 1), ("b", 2)], '[{"text": row[0]} for row in rows]'),
        ([1, 2], '[{"text": row} for row in rows]'),
    ],
)
def test_rows_that_are_no_dicts_are_refused_with_how_to_make_them(rows: Any, way_out: str, tmp_path: Path) -> None:
    with pytest.raises(TooManyErrorsError) as refused:
        run(rows, tmp_path)
    assert way_out in str(refused.value)
    assert run(eval(way_out, {"rows": rows}), tmp_path).ok == len(rows)


@pytest.mark.parametrize("rows", [[[1.0, 2.0], [3.0, 4.0]], np.zeros((3, 2))])
def test_rows_of_numbers_are_taken(rows: Any, tmp_path: Path) -> None:
    assert run(rows, tmp_path).ok == len(rows)


def test_pictures_are_refused_with_how_to_give_them(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (32, 32))
    job: dict[str, Any] = {"task": "image-classify", "model": "digits", "engine": None}
    with pytest.raises(TooManyErrorsError, match=r'give \{"image": a path or the bytes of a file\}'):
        run([image, image], tmp_path, **job)
    with pytest.raises(TooManyErrorsError, match=r"image\.save\(io\.BytesIO\(\), 'PNG'\)"):
        run([{"image": image}] * 2, tmp_path, **job)
    image.save(saved := io.BytesIO(), "PNG")
    assert run([{"image": saved.getvalue()}] * 2, tmp_path, **job).ok == 2


def test_an_async_function_is_refused_with_how_to_wrap_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`def engine\(batch\): return asyncio\.run\(fn\(batch\)\)`"):
        run([{"text": "a"}], tmp_path, engine=awaited)
    assert run([{"text": "a"}], tmp_path, engine=lambda batch: asyncio.run(awaited(batch))).ok == 1


def test_a_csv_file_without_a_header_is_told_what_its_first_line_is(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("hello world,3\nbye,4\n")
    with pytest.raises(ConfigError, match=r"they have hello world, 3; .*first line of a file names its columns: add"):
        run(source, tmp_path)
    assert run(source, tmp_path, text_column="*").ok == 1
    source.write_text("text,n\n" + source.read_text())
    assert run(source, tmp_path).ok == 2


@pytest.mark.parametrize("header", ["title,n", ",0,1"])
def test_a_function_gets_whole_rows_of_a_csv_file_with_a_header(header: str, tmp_path: Path) -> None:
    (source := tmp_path / "in.csv").write_text(f"{header}\na,3{',4' * (header.count(',') - 1)}\n")
    names = header.split(",")
    assert run(source, tmp_path, sink="list", engine=lambda rows: [sorted(row) == sorted(names) for row in rows]) == [
        {"id": 0, "output": True}
    ]


def test_an_engine_given_by_its_name_gets_no_whole_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"they have words; name yours with text_column"):
        run([{"words": "a"}], tmp_path, engine="headrace.testing:FakeEngine")


def test_several_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"text": ["a"]})
    both = datasets.DatasetDict({"train": split, "test": split})
    with pytest.raises(ConfigError, match=r"with the splits train, test: give one of them, such as dataset\['train'\]"):
        run(both, tmp_path)
    assert run(both["train"], tmp_path).ok == 1
