"""Sparse vectors are those of sentence-transformers, in any company, and a struct of lists in Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tests.architectures import TEXTS
from tests.families import family_model

import headrace
from headrace.engines.choosing.registry import create
from headrace.engines.text import sparse
from headrace.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = family_model(tmp_path_factory.mktemp("plain"), "Bert", "ForMaskedLM")
    saved = tmp_path_factory.mktemp("splade")
    SparseEncoder(str(plain), device="cpu").save(str(saved))
    return saved


def dense(vector: Any, length: int) -> Any:
    row = np.zeros(length, np.float32)
    row[vector["indices"]] = vector["values"]
    assert list(vector["indices"]) == sorted(vector["indices"])
    return row


@pytest.mark.parametrize("most", [None, 5])
def test_a_vector_is_that_of_the_text_alone(folder: Path, most: int | None) -> None:
    engine = create("sparse-embed", folder, device="cpu", max_active_dims=most)
    ready = [one.payload for one in engine.prepare(TEXTS)]
    found = engine.forward(ready)
    encoder = SparseEncoder(str(folder), device="cpu")
    for text, vector in zip(TEXTS, found, strict=True):
        expected = encoder.encode(text, max_active_dims=most).to_dense().numpy()
        np.testing.assert_allclose(dense(vector, len(expected)), expected, rtol=1e-4, atol=1e-4)
        assert 0 < len(vector["values"]) <= (most or len(expected))
    assert len({str(vector["indices"]) for vector in found}) > 2


def test_parquet_has_a_struct_of_lists(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    for name in ("v.parquet", "v.jsonl"):
        headrace.run(rows, sink=tmp_path / name, task="sparse-embed", model=folder, device="cpu", max_active_dims=7)
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    kind = table.schema.field("sparse_embedding").type
    assert kind == pa.struct({"indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["sparse_embedding"]["indices"] for line in lines] == [
        row["sparse_embedding"]["indices"] for row in table.to_pylist()
    ]
    query = f"select len(sparse_embedding.indices), sparse_embedding.values from '{tmp_path / 'v.parquet'}'"
    assert all(count == len(values) == 7 for count, values in duckdb.sql(query).fetchall())


def test_other_models_and_values_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use the task sparse-embed"):
        create("embed", folder)
    with pytest.raises(ConfigError, match="which the task sparse-embed cannot use"):
        create("sparse-embed", family_model(tmp_path, "GPT2", "LMHeadModel"))
    with pytest.raises(ConfigError, match="max_active_dims"):
        create("sparse-embed", folder, max_active_dims=0)
    with pytest.raises(ConfigError, match="no default model"):
        create("sparse-embed")


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "DistilBert", "ModernBert"])
def test_tiles_give_what_the_model_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, activation: str, strategy: str
) -> None:
    model = Transformer(
        str(family_model(tmp_path / "plain", architecture, "ForMaskedLM")), transformer_task="fill-mask"
    )
    modules = [model, SpladePooling(pooling_strategy=strategy, activation_function=activation)]
    encoder = SparseEncoder(modules=modules, device="cpu")
    encoder.save(str(tmp_path / "splade"))
    # Of about seven tokens: texts share a tile, and the longer ones take several.
    monkeypatch.setattr(sparse, "MOST_WEIGHTS", 7 * int(model.model.config.vocab_size) + 5)
    engine = create("sparse-embed", tmp_path / "splade", device="cpu")
    assert engine.describe().get("padding") is None and engine._rows.padding == "packed"
    tokens = engine.prepare_column(TEXTS).payloads
    for text, vector in zip(TEXTS, engine.forward(tokens), strict=True):
        expected = encoder.encode(text).to_dense().numpy()
        np.testing.assert_allclose(dense(vector, len(expected)), expected, rtol=1e-4, atol=1e-4)
