"""Which models can be batched continuously: those whose keys and values a paged cache can hold."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION

from headrace.engines.generation.company import switches_at
from headrace.errors import EngineError


def cannot_batch(reason: str) -> EngineError:
    """The error for a model that cannot be batched continuously."""
    return EngineError(f"transformers cannot batch this model continuously: {reason}; use the engine static, or vllm")


def first_line(error: Exception) -> str:
    """The first line of what a library says; the type of an error without words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_pageable(model: PreTrainedModel, longest: int) -> None:
    """Check the model, as far as it tells, for requests of up to `longest` tokens.

    Raises:
        EngineError: a paged cache cannot hold what it stores.
    """
    if not getattr(model, "_supports_attention_backend", False):
        # transformers would only warn, and generate answers that do not attend to earlier tokens.
        raise cannot_batch("its attention does not support a paged cache")
    if reason := _unpageable(model.config):
        raise cannot_batch(reason)
    switch = switches_at(model.config)
    if switch is not None and switch < longest:
        raise cannot_batch(
            f"its rotary embedding computes all positions otherwise as soon as one answer is longer than {switch} "
            f"tokens; set max_model_len to {switch} or less"
        )


def _unpageable(config: PretrainedConfig) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values have different sizes (multi-head latent attention)"
    other = set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION, SLIDING_ATTENTION}
    return f"it has layers of type {min(other)}, which a paged cache does not support" if other else None
