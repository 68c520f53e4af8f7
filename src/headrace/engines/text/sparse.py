"""Sparse embeddings with sparse encoders (SPLADE) of sentence-transformers: weights of some words of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from itertools import groupby
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers.modeling_outputs import BaseModelOutput

from headrace.device.pipeline import OutputRows
from headrace.engines.networks import packing
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.modules import open_encoder
from headrace.engines.text.options import SparseEmbedding

MOST_WEIGHTS = 1 << 26
"""The most weights that are held at once: of each word of the vocabulary for each token of a tile, or for each text."""


class SparseVector(TypedDict):
    """The components of a vector that are not zero."""

    indices: NDArray[np.int32]
    """In ascending order. In most models, the ids of tokens."""
    values: NDArray[np.float32]


def _sparse(most: int | None, row: OutputRows) -> SparseVector:
    """A row without its zeros, or only its `most` largest components by absolute value."""
    indices = np.flatnonzero(row)
    if most is not None and len(indices) > most:
        order = np.argsort(-np.abs(row[indices]), kind="stable")
        indices = np.sort(indices[order[:most]])
    return SparseVector(indices=indices.astype(np.int32), values=row[indices])


class SparseEngine(TextEngine):
    """One sparse vector per text."""

    def __init__(self, options: SparseEmbedding) -> None:
        most = options.max_active_dims
        encoder = open_encoder(SparseEncoder, options)
        most = encoder.module.max_active_dims if most is None else most
        facts: dict[str, object] = {"engine": "sparse-embedding", "max_active_dims": most, **encoder.facts}
        tokens = encoder.tokens()
        call = _Weighed(encoder.module, most)
        network = encoder.network(call, tokens.inputs, no_packing=call.no_packing)
        super().__init__(network, tokens, lambda rows: [_sparse(most, row) for row in rows], facts)
        texts = max(1, min(self.profile.batch_size, MOST_WEIGHTS // self.width))
        budget = self.profile.batch_cost
        if self._rows.padding != "packed":  # a weight of each word for each token is held at once
            budget = min(budget, max(tokens.max_model_len, texts))
        prompts = tuple(encoder.prompts.named)
        self.profile = replace(self.profile, batch_cost=budget, batch_size=texts, prompt_names=prompts)


_TILE: ContextVar[torch.Tensor | None] = ContextVar("headrace_tile", default=None)
"""The states that a model's head is called with alone."""


class _Weighed:
    """Calls a sparse encoder: a weight of each word for each text.

    A row of texts without padding goes through the model's layers whole, and through its head, which gives a weight of
    each word for each token, in tiles: all at once would take gigabytes for a large batch.
    """

    def __init__(self, module: SparseEncoder, most: int | None) -> None:
        self._module = module
        self._limit = {} if most is None else {"max_active_dims": most}
        is_pooled = [type(part) for part in module][1:] == [SpladePooling]
        self.no_packing = "" if is_pooled else "its weights are not made by SPLADE's pooling alone"
        """Why it takes no row; empty if it can be tried."""
        if not self.no_packing:
            _let_head_be_called_alone(module[0].model.base_model)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row = packing.current()
        if row is None:
            vectors: torch.Tensor = self._module(dict(tensors), **self._limit)["sentence_embedding"]
            return vectors
        model, pooling = self._module[0].model, self._module[1]
        states = packing.states(model.base_model, tensors, row)
        found: list[torch.Tensor] = []
        most = max(1, MOST_WEIGHTS // int(model.config.vocab_size))
        for start, lengths in _tiles(np.diff(row.plan.starts).tolist(), most):
            if lengths[0] > most:  # a long text alone
                pieces = states[start : start + lengths[0]].split(most)
                parts = torch.stack([_pooled(self._head(piece)[None], pooling)[0] for piece in pieces])
                found.append((parts.amax(0) if pooling.pooling_strategy == "max" else parts.sum(0))[None])
                continue
            weights, end = self._head(states[start : start + sum(lengths)]), 0
            for length, equal in groupby(lengths):
                begin, end = end, end + length * sum(1 for _ in equal)
                found.append(_pooled(weights[begin:end].unflatten(0, (-1, length)), pooling))
        return torch.cat(found)

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        """The weight of each word for each token, of shape (tokens, words)."""
        token = _TILE.set(states[None])
        try:
            logits: torch.Tensor = self._module[0].model(input_ids=None, attention_mask=None).logits
        finally:
            _TILE.reset(token)
        return logits[0]


def _tiles(lengths: list[int], most: int) -> Iterator[tuple[int, list[int]]]:
    """Neighbouring texts of together at most `most` tokens, or a longer text alone: where they start, and their
    lengths."""
    start, tile = 0, list[int]()
    for length in lengths:
        if tile and sum(tile) + length > most:
            yield start, tile
            start, tile = start + sum(tile), []
        tile.append(length)
    yield start, tile


def _pooled(weights: torch.Tensor, pooling: SpladePooling) -> torch.Tensor:
    """One row of weights per text from those of its tokens, of shape (texts, tokens, words).

    The activation never falls, so the largest is found first: it is then computed once per text, not per token.
    """
    if pooling.pooling_strategy == "max":
        weights = weights.amax(1).float()
    weights = weights.relu().log1p()
    if pooling.activation_function == "log1p_relu":
        weights = weights.log1p()
    return weights if pooling.pooling_strategy == "max" else weights.sum(1)


def _let_head_be_called_alone(base: torch.nn.Module) -> None:
    """Let a model be called with the last states of its layers, in `_TILE`, in place of ids."""
    forward = base.forward

    def given_or_computed(*args: object, **others: object) -> object:
        tile = _TILE.get()
        return forward(*args, **others) if tile is None else BaseModelOutput(last_hidden_state=tile)

    base.forward = given_or_computed
