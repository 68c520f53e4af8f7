"""The key-value cache of a language model on transformers, in pages that requests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION

from headrace.engines.generation.causal_lm import CausalLM
from headrace.engines.generation.company import switches_at
from headrace.engines.generation.ragged_attention import use_ragged_attention
from headrace.engines.generation.sampling import BatchSampler
from headrace.engines.generation.scheduler import PageScheduler
from headrace.errors import ConfigError, EngineError, ModelCodeError, model_code

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )

PAGE = 32
"""Tokens per page of the key-value cache. transformers' default of 256 wastes most of a page on short answers."""

_BATCH_TOKENS = {"cpu": 512, "cuda": 8_192}
"""Maximum tokens per step; longer prompts take several steps. Without flash attention, the attention mask has this many
rows, each as long as the cache."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What the cache holds."""

    tokens: int
    slots: int
    """Maximum concurrent answers."""
    share: bool | None
    """Whether prompts that begin with the same tokens use the same pages; None for True if the attention allows it."""
    is_split: bool
    """Whether the model is split over several processes."""

    @property
    def count(self) -> int:
        """One more page per answer, since its last page is rarely full: this keeps the budget in tokens."""
        return -(-self.tokens // PAGE) + self.slots + 1


@torch.inference_mode()  # type: ignore[untyped-decorator]
def open_cache(
    lm: CausalLM, sampler: BatchSampler, pages: Pages
) -> tuple[ContinuousBatchingManager, ContinuousBatchProcessor]:
    """The cache, and what runs steps on it.

    Raises:
        EngineError: the device has no room, or the model cannot be batched continuously.
    """
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages.count,
        max_batch_tokens=max(_BATCH_TOKENS[lm.device.type], pages.slots),
        max_requests_per_batch=pages.slots,
        safety_margin=0.0,  # the batcher enforces the budget
        allow_block_sharing=False,  # `PageScheduler` shares pages
        # The engine runs each step and chooses the tokens: nothing may run ahead or be captured.
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=lm.device.type == "cuda",
        # Of use only with graphs; in a split model, transformers warns where the environment does not set it.
        **({"disable_nccl_graph_mixing": False} if pages.is_split else {}),
    )
    ends = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=lm.pad_token)
    begin = lm.model.init_continuous_batching
    with _refusals(lm, pages):
        manager = begin(ends, config)
    manager.logit_processor = sampler
    create = manager._create_batch_processor  # outside: a change of transformers is not the model's fault
    with _refusals(lm, pages):
        processor = create()
    return manager, processor


@contextmanager
def _refusals(lm: CausalLM, pages: Pages) -> Iterator[None]:
    try:
        with model_code():  # transformers refuses an attention or a cache in many ways
            try:
                yield
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise EngineError(
                    f"{lm.device} has no room for a cache of {pages.count * PAGE:,} tokens; lower ``kv_cache_tokens``, "
                    "``max_num_seqs`` or ``max_model_len``"
                ) from error
    except ModelCodeError as error:
        raise cannot_batch(str(error)) from error


def share_pages(lm: CausalLM, processor: ContinuousBatchProcessor, pages: Pages) -> PageScheduler | None:
    """Replace transformers' scheduler by one that shares pages; None if the model's attention does not allow it.

    Raises:
        ConfigError: sharing was asked for, and is not possible.
    """
    kinds = sorted(processor.cache.cache_allocators)
    if kinds != [FULL_ATTENTION]:
        if pages.share:
            raise ConfigError(
                f"``enable_prefix_caching`` is true: it needs full_attention in all layers, and this model has "
                f"{' and '.join(kinds)}; leave it out"
            )
        return None
    ragged = lm.device.type == "cpu" and use_ragged_attention(lm.model, processor.cache)
    if ragged:
        processor.inputs_and_outputs.attention_mask = None  # filling it would take longer than the attention
    scheduler = PageScheduler(processor.cache, pages.slots, share=pages.share is not False, indexed=not ragged)
    processor.scheduler = processor.offloading_manager.scheduler = scheduler
    return scheduler


def cannot_batch(reason: str) -> EngineError:
    """The error for a model that cannot be batched continuously."""
    return EngineError(f"transformers cannot batch this model continuously: {reason}; use the engine static, or vllm")


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
