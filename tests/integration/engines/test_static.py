"""Static embeddings of sentence-transformers: the same vectors, for texts of any length."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tests.integration.serving.running import running
from tokenizers import Tokenizer

from headrace.app.servers.server import ServerSettings
from headrace.engines.base import Prepared, TokenIds
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.engines.model_folder import find_folder
from headrace.errors import ConfigError, EngineError

TEXTS = ["a mill", "the canal feeds a wheel, and the wheel turns", "word " * 5_000, "Größe 水"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of vectors with the tokenizer of all-MiniLM-L6-v2, which cuts and adds special tokens by itself."""
    place = tmp_path_factory.mktemp("static") / "model"
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(find_folder(None) / "tokenizer.json"))
    tokenizer.no_truncation()
    table = StaticEmbedding(tokenizer, embedding_dim=24)
    prompts = {"query": "find: "}
    SentenceTransformer(modules=[table, Normalize()], prompts=prompts, device="cpu").save(str(place))
    return place


def vectors(engine: Any, texts: list[Any]) -> np.ndarray[Any, Any]:
    prepared = engine.prepare(texts)
    assert all(isinstance(one, Prepared) and not one.truncated for one in prepared)
    return np.array(engine.forward([one.payload for one in prepared]))


def test_the_vectors_are_those_of_sentence_transformers(folder: Path) -> None:
    reference = SentenceTransformer(str(folder), device="cpu")
    engine = create("embed", str(folder))
    assert np.abs(vectors(engine, TEXTS) - reference.encode(TEXTS)).max() < 1e-5
    alone = [vectors(engine, [text])[0] for text in TEXTS]
    assert np.abs(np.array(alone) - reference.encode(TEXTS)).max() < 1e-5
    ids = [TokenIds(tuple(engine.tokenize(text, add_special_tokens=True))) for text in TEXTS]
    assert np.abs(vectors(engine, ids) - reference.encode(TEXTS)).max() < 1e-5
    assert (engine.profile.dimension, engine.profile.max_model_len) == (24, None)
    engine.close()
    query = create("embed", str(folder), prompt_name="query", truncate_dim=8, normalize=True)
    expected = reference.encode(TEXTS, prompt_name="query", truncate_dim=8, normalize_embeddings=True)
    assert np.abs(vectors(query, TEXTS) - expected).max() < 1e-5


def test_a_text_without_tokens_is_refused_and_a_length_can_be_set(folder: Path) -> None:
    engine = create("embed", str(folder), max_model_len=3)
    empty, cut = engine.prepare(["  ", "one two three four"])
    assert isinstance(empty, Exception)
    assert isinstance(cut, Prepared)
    assert (cut.cost, cut.truncated) == (3, True)
    with pytest.raises(ConfigError, match="float32"):
        create("embed", str(folder), dtype="bfloat16")


def test_the_weights_of_model2vec_are_read(folder: Path, tmp_path: Path) -> None:
    """Their table has another name, and may be shared by several tokens."""
    import json
    import shutil

    shutil.copytree(folder, tmp_path / "model")
    [weights] = (tmp_path / "model").rglob("model.safetensors")
    size = Tokenizer.from_file(str(weights.parent / "tokenizer.json")).get_vocab_size()
    mapping = torch.arange(size) % 100
    save_file({"embeddings": torch.randn(100, 24), "mapping": mapping, "weights": torch.rand(size)}, weights)
    assert json.loads((tmp_path / "model" / "modules.json").read_text())
    if tuple(map(int, version("sentence-transformers").split(".")[:2])) < (6, 2):
        with pytest.raises(EngineError, match=r"'mapping' .* 6\.2 or later"):
            create("embed", str(tmp_path / "model"))
        return
    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    engine = create("embed", str(tmp_path / "model"))
    assert np.abs(vectors(engine, TEXTS) - reference.encode(TEXTS)).max() < 1e-5


def test_a_server_and_a_job_take_them(folder: Path, tmp_path: Path) -> None:
    import json

    import headrace

    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with running(ServerSettings(EngineConfig("embed", str(folder)))) as server:
        body = server.post("/v1/embeddings", {"input": TEXTS}).json()
        assert np.abs(np.array([one["embedding"] for one in body["data"]]) - reference).max() < 1e-5
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    headrace.run(rows, str(folder), sink=tmp_path / "out.jsonl", progress=False)
    found = [json.loads(line)["embedding"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert np.abs(np.array(found) - reference).max() < 1e-5


@pytest.mark.parametrize("kind", ["Router", "LSTM"])
def test_other_modules_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    from sentence_transformers.sentence_transformer.modules import LSTM, Pooling, Router, Transformer
    from tests.small_models import text_model

    encoder = Transformer(str(text_model(tmp_path / "encoder", head=False)))
    parts: dict[str, list[Any]] = {
        "Router": [Router.for_query_document([encoder, Pooling(32)], [encoder, Pooling(32)])],
        "LSTM": [encoder, LSTM(32, 16), Pooling(32)],
    }
    SentenceTransformer(modules=parts[kind], device="cpu").save(str(tmp_path / "model"))
    with pytest.raises(EngineError, match=f"module {kind} of sentence-transformers, which is not supported"):
        create("embed", str(tmp_path / "model"))
