"""Rows with a list of documents, which are ranked for the row's text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tests.small_models import text_model

import headrace
from headrace.errors import ConfigError
from headrace.jobs.pipeline.candidates import ranking

DOCUMENTS = [f"a mill {'by the water ' * n}" for n in range(5)]
ROWS: list[dict[str, Any]] = [
    {"id": 0, "query": "number one", "documents": DOCUMENTS},
    {"id": 1, "query": "two", "documents": []},
    {"id": 2, "query": "three", "documents": ["a", None]},
    {"id": 3, "query": "four", "documents": "a text"},
    {"id": 4, "query": "five", "documents": None},
    {"id": 5, "query": "six", "documents": DOCUMENTS[:2]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("model"), ["x"])


@pytest.fixture
def ranked(folder: Path) -> Callable[..., Any]:
    def run(sink: object, **settings: Any) -> Any:
        settings = {"text_column": "query", "documents_column": "documents", "max_error_rate": 1, **settings}
        return headrace.run(ROWS, folder, sink=sink, task="score", batch_size=3, progress=False, **settings)  # type: ignore[call-overload]

    return run


def test_the_ranking_is_that_of_the_scores_of_its_pairs(
    ranked: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    report = ranked(tmp_path / "out.parquet")
    assert (report.ok, report.failed) == (3, 3)
    first, empty, last = pyarrow.parquet.read_table(tmp_path / "out.parquet")["ranking"].to_pylist()
    pairs = [{"text": "number one", "second": document} for document in DOCUMENTS]
    alone = headrace.run(
        pairs, folder, sink="list", task="score", text_pair_column="second", dtype="float32", progress=False
    )
    assert first["scores"] == pytest.approx([row["score"] for row in alone], abs=1e-3)
    assert first["indices"] == sorted(range(5), key=lambda place: -first["scores"][place])
    assert empty == {"scores": [], "indices": []}
    assert len(last["scores"]) == 2
    letters = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [letter["position"] for letter in letters] == [2, 3, 4]
    for letter, words in zip(letters, ("document 1 in column", "must be a list of texts", "is null"), strict=True):
        assert words in letter["message"]


def test_fields_become_columns_and_streams_have_the_same(ranked: Callable[..., Any], folder: Path) -> None:
    row = ranked("list", flatten="auto")[0]
    assert list(row) == ["id", "scores", "indices"]
    with headrace.load("score", folder, batch_size=3) as model:
        rows = list(model.stream(ROWS, text_column="query", documents_column="documents"))
    assert rows[0]["ranking"]["indices"] == row["indices"]
    assert rows[1]["ranking"] == {"scores": [], "indices": []}
    assert [row["id"] for row in rows if "error" in row] == [2, 3, 4]


def test_equal_scores_stay_in_order_and_nan_is_last() -> None:
    assert ranking([float("nan"), 0.5, 0.7, 0.5], ())["indices"] == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text_pair_column": "query"}, "text_pair_column does not go with documents_column"),
        ({"prompt_template": "{query}", "text_column": None}, "prompt_template does not go with"),
        ({"prompt_template": "{query}"}, "text_column has no effect beside prompt_template"),
        ({"on_too_long": "split"}, "on_too_long=.split. does not go with"),
        ({"documents_column": "docs"}, r"has a column 'docs'.*documents_column"),
        ({"documents_column": None}, r"text_pair_column\), or that of lists of them \(documents_column"),
        ({"task": "embed", "model": None}, "scores pairs, such as .*: embed does not"),
    ],
)
def test_what_cannot_be_ranked_is_refused(settings: dict[str, Any], words: str, folder: Path) -> None:
    given = {"text_column": "query", "documents_column": "documents", "task": "score", "model": folder, **settings}
    with pytest.raises(ConfigError, match=words):
        headrace.run(ROWS, sink="list", progress=False, **given)  # type: ignore[call-overload]
