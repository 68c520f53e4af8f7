"""Attention on a CPU, computed in the faster of two ways.

PyTorch's fused attention takes one head of one sequence after another, in small products. Plain products take all heads
of many sequences at once, but write their scores to memory. In bfloat16 with AVX-512, they take about 0.6 of the time,
and a batch of MiniLM with 120 to 240 tokens per text 0.85 of its processor time.
Other CPUs may differ, so a process times both ways once for each kind of heads. In float32, there is no difference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "headrace_cpu"

SCORES_BYTES = 1 << 21
"""Scores computed at once. So few stay in the CPU's cache, and in memory that the process already has."""
_SHORT = 128
"""Sequences of up to this many tokens are computed in the way that is faster for half as many, others for twice."""
_TIMED_TOKENS = 2_048
"""Tokens in a batch that is timed: more than the cache of a core holds, as in real batches."""
_TIMES = 3
"""How often each way is timed. The fastest counts: other work on the machine makes a run longer, never shorter."""

_TRIED = (torch.bfloat16, torch.float16)
"""Dtypes in which both ways are timed; others are computed by the fused one."""

AttentionWay: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor
]


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attention of sequences of one length.

    Args:
        queries: of shape (sequences, heads, tokens, width), like keys and values.
        mask: added to the scores; its shape is (1, 1, tokens or 1, tokens).
        scale: of the scores; None for 1 / sqrt(width).

    Returns:
        Outputs of shape (sequences, tokens, heads, width).
    """
    _, heads, tokens, width = queries.shape
    way = faster(heads, width, queries.dtype, tokens <= _SHORT) if queries.dtype in _TRIED else fused
    return way(queries, keys, values, mask, scale)


@functools.lru_cache
def faster(heads: int, width: int, dtype: torch.dtype, short: bool) -> AttentionWay:
    """The faster way for `heads` heads of `width` components. Takes 10 to 100 ms the first time."""
    tokens = _SHORT // 2 if short else _SHORT * 2
    shape = (_TIMED_TOKENS // tokens, tokens, heads, width)
    states = [torch.ones(shape, dtype=dtype).transpose(1, 2) for _ in range(3)]
    seconds: dict[AttentionWay, list[float]] = {fused: [], by_products: []}
    for _ in range(_TIMES):
        for way, took in seconds.items():
            started = time.perf_counter()
            way(states[0], states[1], states[2], None, None)
            took.append(time.perf_counter() - started)
    return min(seconds, key=lambda way: min(seconds[way]))


def fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """PyTorch's fused attention; see `attend`."""
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale).transpose(1, 2)


def by_products(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attention by products of matrices, some sequences at a time; see `attend`."""
    sequences, heads, tokens, width = queries.shape
    at_once = max(1, SCORES_BYTES // (heads * tokens * tokens * queries.element_size()))
    added = queries.new_zeros(()) if mask is None else mask[0]
    outputs = queries.new_empty(sequences, tokens, heads, width)
    for first in range(0, sequences, at_once):
        here = slice(first, first + at_once)
        query, key, value = (states[here].reshape(-1, tokens, width) for states in (queries, keys, values))
        factor = width**-0.5 if scale is None else scale
        scores = torch.baddbmm(added, query, key.transpose(1, 2), beta=int(mask is not None), alpha=factor)
        found = torch.bmm(scores.softmax(-1), value)
        outputs[here] = found.view(-1, heads, tokens, width).transpose(1, 2)
    return outputs


def use(model: PreTrainedModel) -> bool:
    """Let a model whose sequences are not padded, such as those of images, call `attend`. Returns whether it can."""
    if model.device.type != "cpu" or model.dtype not in _TRIED or model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)
    return True


def undo(model: PreTrainedModel) -> None:
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


def _attend(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    way = attend if attention_mask is None else fused
    return way(query, key, value, attention_mask, scaling), None
