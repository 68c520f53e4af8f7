"""How large the key-value cache of a language model is, and which models have one in pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headrace.device.cuda_memory import cuda_memory
from headrace.device.memory import TARGET_SHARE, memory_limit
from headrace.device.placement import naming_device_errors
from headrace.device.step_sizes import StepSize
from headrace.engines.generation.batch_invariance import switches_at
from headrace.engines.generation.causal_lm import CausalLM
from headrace.engines.generation.options import Generation
from headrace.engines.generation.paged_attention import (
    PAGE,
    AttentionShape,
    PagedModel,
    ShapeProbe,
    forward,
    use_paged_attention,
)
from headrace.engines.generation.tensor_parallel import least_of_ranks
from headrace.errors import ConfigError, EngineError, EngineOutOfMemoryError, ModelCodeError, model_code

logger = logging.getLogger("headrace")

_START = {"cpu": StepSize(64, 512), "cuda": StepSize(64, 8_192)}
_MOST = {"cpu": StepSize(256, 4_096), "cuda": StepSize(512, 8_192)}
_TOKENS_PER_SLOT = 1_024
"""Tokens per answer of the default cache on a CPU. Longer answers use the space of others."""
_CPU_SHARE = 0.25
"""The share of the memory for the cache on a CPU, which has other uses."""
_SAMPLING = 8
"""Tensors as large as the logits of a step in float32, while tokens are chosen."""


class CannotBatchError(EngineError):
    """A model cannot be batched continuously."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this model cannot be batched continuously: {reason}; use the engine static, or vllm")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The key-value cache of a model."""

    tokens: int
    """What answers may hold together."""
    slots: int
    """Maximum concurrent answers that it has pages for."""

    @property
    def pages(self) -> int:
        """One more page per answer, since its last page is rarely full: this keeps the budget in tokens."""
        return -(-self.tokens // PAGE) + self.slots + 1


def step_sizes(kind: str, answers: int | None, tokens: int | None) -> tuple[StepSize, StepSize]:
    """The first size of a step on this kind of device, and the largest; what the user has set is both."""
    start, most = _START[kind], _MOST[kind]
    return (
        StepSize(answers or start.answers, tokens or start.tokens),
        StepSize(answers or most.answers, tokens or most.tokens),
    )


class CacheShapes:
    """What a model stores for a token, found by a forward pass of as many tokens as a step may have.

    Raises:
        CannotBatchError: pages cannot hold it.
        EngineOutOfMemoryError: there is no room for a step.
    """

    def __init__(self, lm: CausalLM, most: StepSize) -> None:
        if not getattr(lm.model, "_supports_attention_backend", False):
            raise CannotBatchError("its attention does not support a paged cache")
        device, on_gpu = lm.device, lm.device.type == "cuda"
        tokens = min(most.tokens, lm.max_model_len) if on_gpu else 2
        probe = ShapeProbe()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        try:
            # A model may need what it is not given.
            with model_code(), naming_device_errors(device, lambda: f"a step of {tokens:,} tokens"):
                use_paged_attention(lm.model)
                places = torch.arange(tokens, device=device)
                logits = forward(lm.model, torch.zeros_like(places), places, places[-most.answers :], probe.attend)
        except ModelCodeError as error:
            raise CannotBatchError(f"its first step fails: {error}") from error
        self.step_bytes = _SAMPLING * 4 * most.answers * logits.shape[-1]
        if on_gpu:
            self.step_bytes += torch.cuda.max_memory_allocated(device) - before
        self.shapes = probe.shapes
        if reason := _unpageable(lm.model, probe.shapes):
            raise CannotBatchError(reason)

    @property
    def token_bytes(self) -> int:
        """What a token takes in the cache."""
        return sum(shape.token_bytes for shape in self.shapes)

    def room(self, device: torch.device, is_split: bool = False) -> int:
        """Tokens for which there is memory, on every device of a split model."""
        if device.type != "cuda":
            return int(memory_limit().bytes * _CPU_SHARE) // self.token_bytes
        free = TARGET_SHARE * cuda_memory(device)[0].bytes - torch.cuda.memory_allocated(device) - self.step_bytes
        gathered = max(shape.token_bytes for shape in self.shapes)  # the keys of all answers, one attention at a time
        room = max(int(free) // (self.token_bytes + gathered), 0)
        return least_of_ranks(room, device) if is_split else room


def choose_size(lm: CausalLM, shapes: CacheShapes, start: StepSize, most: StepSize, options: Generation) -> CacheSize:
    """The size of the cache: what was asked for, else what the device has room for.

    If one answer of the model's longest length does not fit, its length is limited to what does.

    Args:
        start: the first size of a step.
        most: the largest size of a step.

    Raises:
        ConfigError: one answer may need more tokens than were asked for.
        EngineError: the device has no room for it.
    """
    wanted = options.kv_cache_tokens
    if wanted is not None and wanted < lm.max_model_len:
        raise ConfigError(
            f"``kv_cache_tokens`` is {wanted}: one answer may need {lm.max_model_len}; raise it or lower "
            "``max_model_len``"
        )
    if wanted is None:
        if lm.device.type == "cuda":
            tokens = most.answers * lm.max_model_len
        else:
            tokens = start.answers * min(lm.max_model_len, _TOKENS_PER_SLOT)
        tokens = min(max(tokens, lm.max_model_len), shapes.room(lm.device, options.tensor_parallel_size > 1))
    else:
        tokens = wanted
    enough = tokens >= lm.max_model_len or (options.max_model_len is None and tokens >= PAGE)
    if not enough or (wanted is not None and wanted * shapes.token_bytes > _limit(lm.device)):
        raise EngineError(
            f"{lm.device} has no room for a cache of {max(tokens, lm.max_model_len):,} tokens; lower "
            "``kv_cache_tokens``, ``max_num_seqs`` or ``max_model_len``"
        )
    if tokens < lm.max_model_len:
        logger.warning(
            "a text may have %d tokens, prompt and answer together: %s has no room for the keys and values of the "
            "%d that the model can take",
            tokens,
            lm.device,
            lm.max_model_len,
        )
        lm.max_model_len = tokens
    return CacheSize(tokens, most.answers)


def open_cache(lm: CausalLM, shapes: Sequence[AttentionShape], size: CacheSize, kernels: bool) -> PagedModel:
    """The model with its cache, and with Headrace's own kernels or without.

    Raises EngineError: the device has no room.
    """
    what = f"a cache of {size.pages * PAGE:,} tokens"
    try:
        with naming_device_errors(lm.device, lambda: what):
            return PagedModel(lm.model, shapes, size.pages, kernels=kernels)
    except EngineOutOfMemoryError as error:
        raise EngineError(
            f"{lm.device} has no room for {what}; lower ``kv_cache_tokens``, ``max_num_seqs`` or ``max_model_len``"
        ) from error


def check_length(lm: CausalLM) -> None:
    """Check that no answer changes how the others are computed. Raises CannotBatchError: an answer may."""
    switch = switches_at(lm.model.config)
    if switch is not None and switch < lm.max_model_len:
        raise CannotBatchError(
            f"its rotary embedding computes all positions otherwise as soon as one answer is longer than {switch} "
            f"tokens; set max_model_len to {switch} or less"
        )


def _limit(device: torch.device) -> int:
    return (cuda_memory(device)[0] if device.type == "cuda" else memory_limit()).bytes


def _unpageable(model: PreTrainedModel, shapes: Sequence[AttentionShape]) -> str | None:
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        return f"it has layers of type {min(other)}, which a paged cache does not support"
    layers = int(getattr(text, "num_hidden_layers", 1))
    if len(shapes) < layers:
        return f"{layers - len(shapes)} of its {layers} layers do not keep keys and values"
    windows = sum(shape.window is not None for shape in shapes)
    if windows < list(kinds).count("sliding_attention"):
        return "its attention does not say how many tokens a sliding window has"
    return None
