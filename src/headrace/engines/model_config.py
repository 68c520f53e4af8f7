"""Types of a model's config.json, and what is read of it for all kinds of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from headrace.records import Json


class SentenceTransformersConfig(TypedDict, total=False):
    """Settings in the files of sentence-transformers."""

    activation_fn: str | None
    max_seq_length: int | None
    special_tokens: bool


class ModelConfig(TypedDict, total=False):
    """The fields of a model's config.json that Headrace reads."""

    _name_or_path: str
    architectures: list[str] | None
    id2label: dict[str, str] | dict[int, str] | None
    is_encoder_decoder: bool
    is_matryoshka: bool
    matryoshka_dimensions: list[int] | None
    max_position_embeddings: int | None
    model_type: str
    n_positions: int | None
    pad_token_id: int | None
    problem_type: str | None
    sbert_ce_default_activation_function: str | None
    sentence_transformers: SentenceTransformersConfig | None
    text_config: ModelConfig | None


def ropes_by_length(parameters: Json) -> list[Mapping[str, Json]]:
    """The rotary embeddings that depend on the longest text of a batch, of those of all layers or of each type."""
    every = [parameters, *parameters.values()] if isinstance(parameters, Mapping) else []
    return [one for one in every if isinstance(one, Mapping) and one.get("rope_type") in ("longrope", "dynamic")]
