"""Small real models, made on the spot: random weights, a real tokenizer, real files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

POSITIONS = 40
HIDDEN = 16


def save_small_model(folder: Path, *, decoder: bool = False) -> Path:
    """A BERT, or a Llama that pads on the left, with the vocabulary of all-MiniLM-L6-v2."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaModel

    from headrace.engines.model_folder import find_folder

    side = "left" if decoder else "right"
    tokenizer = AutoTokenizer.from_pretrained(str(find_folder(None)), model_max_length=POSITIONS, padding_side=side)
    tokenizer.save_pretrained(str(folder))
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": POSITIONS,
    }
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**sizes)) if decoder else BertModel(BertConfig(**sizes))
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's threads spin while they wait for each other, which on a busy machine takes ten times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain transformers encoder: 16 hidden units, 40 positions."""
    return save_small_model(tmp_path_factory.mktemp("encoder"))


def save_sentence_model(
    place: Path,
    *,
    pooling: str = "mean",
    include_prompt: bool = True,
    dense: bool = False,
    decoder: bool = False,
    **options: Any,
) -> Path:
    """A sentence-transformers folder around a small model, with the pooling, dense and prompts asked for."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    encoder = Transformer(str(save_small_model(place / "inner", decoder=decoder)))
    modules: list[Any] = [encoder, Pooling(HIDDEN, pooling, include_prompt=include_prompt)]
    if dense:
        modules.append(Dense(HIDDEN, HIDDEN // 2))
    modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu", **options).save(str(place / "model"))
    return place / "model"


@pytest.fixture
def sentence_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes such a folder."""
    return functools.partial(save_sentence_model, tmp_path)
