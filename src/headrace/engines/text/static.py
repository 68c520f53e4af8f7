"""Static embeddings of sentence-transformers: a text's vector is the mean of the fixed vectors of its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from headrace.device.pipeline import NetworkCall
from headrace.engines.networks import packing
from headrace.engines.profile import EngineProfile
from headrace.errors import ConfigError, EngineError

LONGEST = (1 << 24) - 1
"""Maximum tokens of a text: none, for a model without positions."""
_BATCH_TOKENS = 65_536
_BATCH_TEXTS = 1_024


def tokenizer_of(module: StaticEmbedding) -> PreTrainedTokenizerFast:
    """The tokenizer, without special tokens: the module adds none."""
    content = json.loads(module.tokenizer.to_str())
    content["post_processor"] = None
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))


def bagged(call: NetworkCall) -> NetworkCall:
    """Calls the modules with the tokens of all texts in one row, and where each text begins."""

    def on_row(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ids, row = tensors["input_ids"], packing.current()
        if row is None:  # one text, without padding
            return call({"input_ids": ids.flatten(), "offsets": torch.zeros_like(ids[:, 0])})
        return call({"input_ids": ids[: row.plan.tokens], "offsets": row.firsts()})

    return on_row


def profile(found: EngineProfile, max_model_len: int | None) -> EngineProfile:
    """The profile of an engine for texts, with the batches and the length of static embeddings."""
    return replace(found, tunable=False, batch_cost=_BATCH_TOKENS, batch_size=_BATCH_TEXTS, max_model_len=max_model_len)


def check_dtype(dtype: str) -> None:
    """Static embeddings take no time for arithmetic. Raises ConfigError: another dtype than float32 is wanted."""
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"``dtype`` is {dtype!r}; static embeddings run in float32: leave it out")


def check_weights(folder: Path) -> None:
    """Raises EngineError: the installed sentence-transformers reads only a part of the weights."""
    installed = version("sentence-transformers")
    if tuple(map(int, installed.split(".")[:2])) >= (6, 2):
        return
    for file in folder.rglob("model.safetensors"):
        with safe_open(file, "pt") as weights:
            found = {"mapping", "weights"} & set(weights.keys())
        if found:
            raise EngineError(
                f"{file} has {min(found)!r} of model2vec, which sentence-transformers {installed} ignores; install "
                "sentence-transformers 6.2 or later"
            )
