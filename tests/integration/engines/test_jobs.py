"""Whole jobs through each kind of engine: what is read, what is written, what fails alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from tests.small_models import NLI, encoded, picture, text_model, vision_model

import headrace
from headrace.engines.vision.tasks import ImageEngine
from headrace.errors import ConfigError, ResumeMismatchError
from headrace.jobs.pipeline.job import Job


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Forty images of digits and one damaged file."""
    folder = tmp_path / "images"
    folder.mkdir()
    images, numbers = load_digits(return_X_y=True)
    for place, (image, number) in enumerate(zip(images[:40], numbers, strict=False)):
        picture = Image.fromarray((image.reshape(8, 8) * 15.9375).astype(np.uint8))
        picture.save(folder / f"{place:02}-is-{number}.png")
    (folder / "07-is-broken.png").write_bytes(b"\x89PNG and no more")
    return folder


def run(source: Any, sink: Path, **options: Any) -> Any:
    return headrace.run(source, sink=sink, progress=False, device="cpu", **options)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_images_is_classified_and_a_damaged_one_fails_alone(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []

    def counted(prepare: Any) -> Any:
        return lambda self, inputs: prepared.append(len(inputs)) or prepare(self, inputs)

    for name in ("prepare", "prepare_column"):
        monkeypatch.setattr(ImageEngine, name, counted(getattr(ImageEngine, name)))
    report = run(digits, tmp_path / "out.jsonl", task="image-classify", model="digits")
    rows = read(tmp_path / "out.jsonl")
    right = [row["id"].split("-is-")[1] == f"{row['classification']['label']}.png" for row in rows]
    assert np.mean(right) >= 0.9
    [letter] = read(tmp_path / "out.errors.jsonl")
    assert letter["id"] == "07-is-broken.png"
    assert "cannot be decoded" in letter["message"]
    assert (report.ok, report.failed, report.tokens) == (40, 1, 0)
    assert max(prepared) <= 16  # an image is much work, and much memory


@pytest.mark.parametrize("task", ["image-classify", "image-embed"])
def test_blocks_of_images_end_in_the_same_rows_and_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Also if other processes prepare them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for place in range(50):
        name = f"{place:02}.{('jpg', 'png', 'webp', 'gif')[place % 4]}"
        kind = ("JPEG", "PNG", "WEBP", "JPEG")[place % 4]  # a wrong name is no reason to fail
        whole = encoded(picture(40 + 17 * place, 300 - 5 * place, seed=place, mode=("L", "RGB")[place % 3 > 0]), kind)
        (folder / name).write_bytes(whole[: len(whole) // 2] if place % 11 == 10 else whole)
    (folder / "99.png").write_bytes(b"")
    model = vision_model(tmp_path / "model")

    def outputs(name: str, **options: Any) -> tuple[str, str]:
        report = run(folder, tmp_path / f"{name}.jsonl", task=task, model=model, **options)
        assert (report.ok, report.failed) == (46, 5)
        return (tmp_path / f"{name}.jsonl").read_text(), (tmp_path / f"{name}.errors.jsonl").read_text()

    blocks = outputs("blocks")
    processes = outputs("processes", prepare_processes=2)
    monkeypatch.setattr(Job, "in_blocks", False)
    for others in (processes, outputs("rows")):
        assert others[1] == blocks[1]
        for ours, theirs in zip(*(map(json.loads, text.splitlines()) for text in (blocks[0], others[0])), strict=True):
            if task == "image-embed":  # numbers are rounded as the company in a batch has it
                np.testing.assert_allclose(ours.pop("embedding"), theirs.pop("embedding"), atol=1e-4)
            else:
                score = theirs["classification"].pop("score")
                assert ours["classification"].pop("score") == pytest.approx(score, abs=1e-4)
            assert ours == theirs


def test_a_job_that_was_begun_with_exact_pixels_is_not_continued_with_others(digits: Path, tmp_path: Path) -> None:
    """As those of versions that had no other way, whose outputs say nothing of it."""
    sink = tmp_path / "out.jsonl"
    run(digits, sink, task="image-classify", model="digits", pixels="exact")
    with pytest.raises(ResumeMismatchError, match="pixels was 'exact', now not set"):
        run(digits, sink, task="image-classify", model="digits")
    assert run(digits, sink, task="image-classify", model="digits", pixels="exact").skipped == 41
    run(digits, sink, task="image-classify", model="digits", overwrite=True)
    with pytest.raises(ResumeMismatchError, match=r"pixels was .*, now 'exact'"):
        run(digits, sink, task="image-classify", model="digits", pixels="exact")


def test_image_vectors_are_written_as_vectors(digits: Path, tmp_path: Path) -> None:
    run(digits, tmp_path / "out.parquet", task="image-embed", model="digits")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[48]"
    assert table.num_rows == 40


def test_pairs_are_two_columns(tmp_path: Path) -> None:
    rows = [{"question": f"number {n}", "passage": "a mill " * n} for n in range(5)]
    source = write(tmp_path / "in.jsonl", *rows, {"question": "alone", "passage": None})
    columns = {"text_column": "question", "text_pair_column": "passage"}
    folder = text_model(tmp_path / "model", ["x"])
    run(source, tmp_path / "out.jsonl", task="score", model=folder, **columns)
    scores = [row["score"] for row in read(tmp_path / "out.jsonl")]
    assert len(set(scores)) == 5
    assert "'passage' is null" in read(tmp_path / "out.errors.jsonl")[0]["message"]
    with pytest.raises(
        ConfigError, match=r"'score' takes pairs: name the column of the second text \(text_pair_column\)"
    ):
        run(source, tmp_path / "other.jsonl", task="score", model=folder, text_column="question")
    with pytest.raises(ConfigError, match="task 'embed' takes no pairs: leave out"):
        run(source, tmp_path / "other.jsonl", **columns)


def test_labels_of_ones_own_in_parquet(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "the wheel turns"}, {"text": "water"})
    folder = text_model(tmp_path / "model", NLI)
    run(source, tmp_path / "out.parquet", task="zero-shot", model=folder, labels=["canal", "mill"])
    [first, _] = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert set(first["classification"]) == {"label", "score", "labels", "scores"}
    assert first["classification"]["label"] == first["classification"]["labels"][0]


def test_a_function_is_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def lengths(values: list[str]) -> list[Any]:
        sizes.append(len(values))
        return [ValueError("too short") if value == "x" else {"length": len(value)} for value in values]

    monkeypatch.setattr(sys.modules[__name__], "lengths", lengths, raising=False)
    monkeypatch.setitem(sys.modules, "own_engine", sys.modules[__name__])
    source = write(tmp_path / "in.jsonl", *({"text": "x" * n} for n in range(1, 12)))
    report = headrace.run(
        source, sink=tmp_path / "out.jsonl", task="custom", engine="own_engine:lengths", batch_size=4, progress=False
    )
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [{"length": n} for n in range(2, 12)]
    assert (report.failed, report.tokens) == (1, 0)
    assert max(sizes) == 4
