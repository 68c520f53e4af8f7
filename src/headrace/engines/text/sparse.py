"""Sparse embeddings with sparse encoders (SPLADE) of sentence-transformers: weights of some words of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SparseEncoder

from headrace.device.pipeline import NetworkCall, OutputRows
from headrace.engines.model_folder import named_folder
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.modules import open_encoder
from headrace.engines.text.options import SparseEmbedding

_BATCH_WEIGHTS = 1 << 26
"""Maximum tokens × vocabulary of a batch by default: a network gives a weight of each word for each token."""


class SparseVector(TypedDict):
    """The components of a vector that are not zero."""

    indices: NDArray[np.int32]
    """In ascending order. In most models, the ids of tokens."""
    values: NDArray[np.float32]


class SparseHead:
    """Sparse vectors from rows.

    Args:
        max_active_dims: how many components to keep, the largest by absolute value; None for all.
    """

    def __init__(self, max_active_dims: int | None) -> None:
        self._most = max_active_dims

    def __call__(self, rows: OutputRows) -> list[SparseVector]:
        """One vector per row."""
        return [self._sparse(row) for row in rows]

    def _sparse(self, row: OutputRows) -> SparseVector:
        indices = np.flatnonzero(row)
        if self._most is not None and len(indices) > self._most:
            order = np.argsort(-np.abs(row[indices]), kind="stable")
            indices = np.sort(indices[order[: self._most]])
        return SparseVector(indices=indices.astype(np.int32), values=row[indices])


class SparseEngine(TextEngine):
    """One sparse vector per text.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded.
    """

    def __init__(self, options: SparseEmbedding) -> None:
        most = options.max_active_dims
        named_folder(options.model)
        encoder = open_encoder(SparseEncoder, options)
        most = encoder.module.max_active_dims if most is None else most
        facts: dict[str, object] = {"engine": "sparse-embedding", "max_active_dims": most, **encoder.facts}
        tokens = encoder.tokens()
        why_not = "the weights of words are pooled from padded texts"
        network = encoder.network(_caller(encoder.module, most), tokens.inputs, no_packing=why_not)
        super().__init__(network, tokens, SparseHead(most), facts)
        most_tokens = max(tokens.max_model_len, _BATCH_WEIGHTS // int(encoder.module[0].config.vocab_size))
        budget = min(self.profile.batch_cost, most_tokens)
        self.profile = replace(self.profile, batch_cost=budget, prompt_names=tuple(encoder.prompts.named))


def _caller(module: SparseEncoder, most: int | None) -> NetworkCall:
    limit = {} if most is None else {"max_active_dims": most}

    def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        vectors: torch.Tensor = module(dict(tensors), **limit)["sentence_embedding"]
        return vectors

    return call
