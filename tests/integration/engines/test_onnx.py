"""ONNX models give what PyTorch gives, without PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.export_onnx import Positional
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tests.small_models import text_model

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.errors import ConfigError, EngineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.onnx", "ignore::FutureWarning:copyreg")
ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["", "a", "the canal feeds the wheel", "so that it never runs dry " * 12]


def outputs(engine: Any, inputs: Sequence[Any]) -> list[Any]:
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return list(engine.forward([one.payload for one in ready]))


def test_token_states_are_pooled_as_a_sentence_transformers_folder_says(tmp_path: Path) -> None:
    """The usual layout: the network alone is ONNX, in a folder `onnx`, and its pooling is beside it."""
    import torch
    from transformers import BertConfig, BertModel

    inner = text_model(tmp_path / "inner")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, vocab_size=30_522, initializer_range=0.3)).save_pretrained(inner)
    encoder = Transformer(str(inner))

    class Network:
        module = encoder.auto_model.eval()

        @staticmethod
        def call(tensors: Any) -> Any:
            return Network.module(**tensors).last_hidden_state

    names = ["input_ids", "attention_mask"]
    rows, tokens = torch.export.Dim("rows", min=1, max=999), torch.export.Dim("tokens", min=2, max=999)
    torch.onnx.export(
        Positional(Network, names).eval(),
        (torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)),
        tmp_path / "model.onnx",
        dynamo=True,
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes=(tuple({0: rows, 1: tokens} for _ in names),),
        external_data=False,
        verbose=False,
    )
    for pooling in ("mean", "cls", "max"):
        model = SentenceTransformer(modules=[encoder, Pooling(32, pooling), Normalize()], device="cpu")
        model.max_seq_length = 24
        folder = tmp_path / pooling
        model.save(str(folder))
        (folder / "onnx").mkdir()
        shutil.copy(tmp_path / "model.onnx", folder / "onnx")
        engine = create("embed", folder, engine="onnx")
        assert engine.profile.max_model_len == 24
        assert np.abs(np.array(outputs(engine, TEXTS)) - model.encode(TEXTS)).max() < 1e-5


def test_what_is_no_onnx_model_says_so(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no weights \(\*\.onnx\)"):
        create("classify", folder, engine="onnx")
    (folder / "model.onnx").write_bytes(b"no protobuf")
    with pytest.raises(EngineError, match=r"model\.onnx cannot be loaded"):
        create("classify", folder, engine="onnx")
    with pytest.raises(ConfigError, match=r"no execution provider 'ToasterExecutionProvider'; available: .*CPU"):
        create("classify", folder, engine="onnx", providers=["ToasterExecutionProvider"])
    (folder / "model.onnx").rename(folder / "one.onnx")
    (folder / "two.onnx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several ONNX files \(one\.onnx, two\.onnx\)"):
        create("classify", folder, engine="onnx")
    with pytest.raises(ConfigError, match="has no default model"):
        create("embed", engine="onnx")


def test_layers_outside_the_onnx_file_are_refused_by_name(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / "model.onnx").write_bytes(b"")
    modules = [{"idx": 0, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(EngineError, match="has the module Dense, which the engine onnx does not compute; export"):
        create("embed", folder, engine="onnx")
