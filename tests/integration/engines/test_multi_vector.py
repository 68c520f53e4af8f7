"""Multi-vector embeddings are those of plain arithmetic for each text alone, in any company."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Transformer
from tests.families import COLBERT_PROMPTS, change, colbert, family_model
from tests.integration.serving.running import running

import headrace
from headrace.app.servers.server import ServerSettings
from headrace.engines.base import PromptedText
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.errors import ConfigError, EngineError

TEXTS = ["the canal, the mill. and: its wheel!", "a", "so that it never runs dry " * 12, "", "turns, and turns."]
PROMPTS, WIDTH, LENGTH = COLBERT_PROMPTS, 8, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colbert(tmp_path_factory.mktemp("colbert") / "model")


def expected(folder: Path, text: str, *, query: bool = False, attend: bool = False, fixed: bool = True) -> Any:
    """The vectors of one text, by the definition of late interaction."""
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    longest = (LENGTH if fixed else 64) if query else 40
    ids = tokenizer(PROMPTS["query" if query else "document"] + text, truncation=True, max_length=longest).input_ids
    missing = max(LENGTH - len(ids), 0) if query else 0
    seen = [1] * len(ids) + [int(attend)] * missing
    ids += [tokenizer.mask_token_id] * missing
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
        weights = load_file(next(folder.glob("*Dense*/model.safetensors")))["linear.weight"]
        vectors = torch.nn.functional.normalize(states @ weights.T, dim=-1)
    skipped = set(tokenizer.convert_tokens_to_ids(list(string.punctuation))) - {tokenizer.unk_token_id}
    kept = [place for place, token in enumerate(ids) if query or token not in skipped]
    return vectors[kept].numpy()


def vectors(engine: Any, inputs: list[Any]) -> list[Any]:
    return list(engine.forward([one.payload for one in engine.prepare(inputs)]))


@pytest.mark.parametrize(("attend", "strategy"), [(False, "fixed"), (True, "min")])
def test_queries_and_documents_are_those_of_plain_arithmetic(tmp_path: Path, attend: bool, strategy: str) -> None:
    model = colbert(tmp_path / "model", attend=attend, strategy=strategy)
    engine = create("multi-vector-embed", model, device="cpu")
    inputs = [*TEXTS, *(PromptedText(text, "query") for text in TEXTS)]
    found = vectors(engine, inputs)
    for text, document, query in zip(TEXTS, found, found[len(TEXTS) :], strict=False):
        np.testing.assert_allclose(document, expected(model, text), atol=1e-5)
        wanted = expected(model, text, query=True, attend=attend, fixed=strategy == "fixed")
        np.testing.assert_allclose(query, wanted, atol=1e-5)
    assert len(found[0]) < engine.prepare(TEXTS[:1])[0].cost  # without punctuation
    reference = MultiVectorEncoder(str(model), device="cpu")
    for text, document, query in zip(TEXTS, found, found[len(TEXTS) :], strict=False):
        np.testing.assert_allclose(document, reference.encode_document(text).numpy(), atol=1e-5)
        np.testing.assert_allclose(query, reference.encode_query(text).numpy(), atol=1e-5)


def test_a_wide_model_keeps_its_expansion_tokens(tmp_path: Path) -> None:
    """Without padding, encoders would leave out tokens that nothing attends to."""
    plain = family_model(tmp_path / "plain", "Bert", hidden_size=256)
    encoder = Transformer(str(plain), query_expansion={"strategy": "fixed", "attend": False, "length": LENGTH})
    projection = Dense(256, WIDTH, bias=False, module_input_name="token_embeddings")
    modules = [encoder, projection, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    reference = MultiVectorEncoder(modules=modules, prompts=PROMPTS, device="cpu")
    reference.save(str(tmp_path / "model"))
    engine = create("multi-vector-embed", tmp_path / "model", device="cpu", prompt_name="query")
    for text, found in zip(TEXTS, vectors(engine, TEXTS), strict=True):
        np.testing.assert_allclose(found, reference.encode_query(text).numpy(), atol=1e-5)


def test_stanford_s_and_pylate_s_files_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    stanford = family_model(tmp_path / "stanford", "Bert")
    weights = {f"bert.{name}": tensor for name, tensor in load_file(stanford / "model.safetensors").items()}
    torch.manual_seed(2)
    save_file(weights | {"linear.weight": torch.randn(WIDTH, 32)}, stanford / "model.safetensors", {"format": "pt"})
    change(stanford, architectures=["HF_ColBERT"])
    change(stanford, "artifact.metadata", query_maxlen=9, doc_maxlen=20, query_token_id="mill", doc_token_id="canal")
    pylate = colbert(tmp_path / "pylate")
    steps = json.loads((pylate / "modules.json").read_text())[:2]  # the mask and the scaling were not modules then
    steps[1]["type"] = "pylate.models.Dense.Dense"
    (pylate / "modules.json").write_text(json.dumps(steps))
    change(pylate, "config_sentence_transformers.json", model_type="ColBERT", query_prefix="the ", document_prefix="a ")
    for model in (stanford, pylate):
        reference = MultiVectorEncoder(str(model), device="cpu")
        engine = create("multi-vector-embed", model, device="cpu")
        inputs = [*TEXTS, *(PromptedText(text, "query") for text in TEXTS)]
        wanted = [*reference.encode_document(TEXTS), *reference.encode_query(TEXTS)]
        for found, vectors_of_one in zip(vectors(engine, inputs), wanted, strict=True):
            np.testing.assert_allclose(found, vectors_of_one.numpy(), atol=1e-5)


def test_a_job_and_a_server_give_them(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    for name, kind in (("v.parquet", "float16"), ("v.jsonl", "float32")):
        headrace.run(
            rows, sink=tmp_path / name, task="multi-vector-embed", model=folder, device="cpu", output_dtype=kind
        )
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    column = table["multi_vector_embedding"]
    assert column.type == pa.list_(pa.list_(pa.float16(), WIDTH))
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    for text, row, line in zip(TEXTS, column.to_pylist(), lines, strict=True):
        np.testing.assert_allclose(np.array(row, np.float32), expected(folder, text), atol=1e-3)
        np.testing.assert_allclose(line["multi_vector_embedding"], expected(folder, text), atol=1e-5)
    config = EngineConfig(task="multi-vector-embed", model=str(folder))
    with running(ServerSettings(config)) as server:
        [document] = server.post("/generate", {"prompts": TEXTS[:1]}).json()["results"]
        [query] = server.post("/generate", {"prompts": TEXTS[:1], "prompt_name": "query"}).json()["results"]
        np.testing.assert_allclose(document, expected(folder, TEXTS[0]), atol=1e-5)
        np.testing.assert_allclose(query, expected(folder, TEXTS[0], query=True), atol=1e-5)
        refused = server.post("/generate", {"prompts": ["a"], "prompt_name": "other"})
        assert refused.status_code == 400
        assert "the prompts of this server are 'query', 'document'" in refused.text


def test_what_is_not_one_is_refused(folder: Path, tmp_path: Path) -> None:
    bert = family_model(tmp_path / "bert", "Bert")
    with pytest.raises(ConfigError, match="which the task multi-vector-embed cannot use; use the task embed"):
        create("multi-vector-embed", bert)
    change(bert, architectures=None)
    with pytest.raises(EngineError, match=r"is not a multi-vector \(ColBERT\) encoder: it has no projection"):
        create("multi-vector-embed", bert)
    with pytest.raises(ConfigError, match="use the task multi-vector-embed"):
        create("embed", folder)
    with pytest.raises(ConfigError, match=r"output_dtype is 'int8'; it must be .*float32.*float16"):
        create("multi-vector-embed", folder, output_dtype="int8")
    with pytest.raises(ConfigError, match="output_dtype is 'float16'; it must be one of float32, int8"):
        create("embed", output_dtype="float16")
