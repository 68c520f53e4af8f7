"""Sparse embeddings with sparse encoders (SPLADE) of sentence-transformers: weights of some words of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SparseEncoder

from headrace.batching.options import whole
from headrace.device.placement import choose_device
from headrace.engines.model_folder import check_tokenizer, named_folder
from headrace.engines.network import Rows
from headrace.engines.text.embedding import load, prompts_of
from headrace.engines.text.encoders import by_length
from headrace.engines.text.splitting import LongTexts, TooLong
from headrace.engines.text.tasks import TextEngine
from headrace.engines.text.tokenizing import TextTokens, choose_length, usable_positions
from headrace.engines.torch_network import TorchNetwork

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

    def __call__(self, rows: Rows) -> list[SparseVector]:
        """One vector per row."""
        return [self._sparse(row) for row in rows]

    def _sparse(self, row: Rows) -> SparseVector:
        indices = np.flatnonzero(row)
        if self._most is not None and len(indices) > self._most:
            order = np.argsort(-np.abs(row[indices]), kind="stable")
            indices = np.sort(indices[order[: self._most]])
        return SparseVector(indices=indices.astype(np.int32), values=row[indices])


class SparseEngine(TextEngine):
    """One sparse vector per text. Parameters that are not listed here are those of `EmbeddingEngine`.

    Args:
        model: a local folder.
        max_active_dims: how many components of a vector to keep, the largest; None for the model's own limit.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded.
    """

    def __init__(  # noqa: PLR0913  # keyword-only options, each with a flag
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        on_too_long: TooLong = "truncate",
        max_active_dims: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if max_active_dims is not None:
            whole("max_active_dims", max_active_dims, 1)
        folder = named_folder(model)
        check_tokenizer(folder)
        place = choose_device(device)
        module = load(folder, place, dtype, kind=SparseEncoder, trust_remote_code=trust_remote_code)
        most = module.max_active_dims if max_active_dims is None else max_active_dims
        prompts = prompts_of(module, prompt_name, prompt)
        config = module[0].config.to_dict()
        shortest = module.tokenizer.num_special_tokens_to_add() + 1
        length = choose_length([module.max_seq_length], usable_positions(config), shortest, max_model_len)
        tokens = TextTokens(
            module.tokenizer, length, LongTexts(on_too_long), prompts=prompts, pad_id=config.get("pad_token_id")
        )
        inputs = frozenset(module.tokenizer.model_input_names) | {"input_ids", "attention_mask"}
        network = TorchNetwork(folder, module, place, _caller(module, most), inputs, by_length(module[0].model))
        facts: dict[str, object] = {"engine": "sparse-embedding", "max_active_dims": most}
        if prompt is not None or prompt_name is not None:
            facts["prompt"] = prompts.default
        super().__init__(network, tokens, SparseHead(most), facts)
        most_tokens = max(length, _BATCH_WEIGHTS // int(config["vocab_size"]))
        budget = min(self.profile.batch_cost, most_tokens)
        self.profile = replace(self.profile, batch_cost=budget, prompt_names=tuple(prompts.named))


def _caller(module: SparseEncoder, most: int | None) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    limit = {} if most is None else {"max_active_dims": most}

    def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        vectors: torch.Tensor = module(dict(tensors), **limit)["sentence_embedding"]
        return vectors

    return call
