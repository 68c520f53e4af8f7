"""Attention over many answers side by side, each to its own tokens alone, for devices without flash attention."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

NAME = "headrace_segments"
_KIND = "full_attention"


def use_ragged_attention(model: PreTrainedModel, cache: PagedAttentionCache) -> None:
    """Let a model attend to a paged cache answer by answer, where all its layers see the whole of what came before.

    transformers' own way without flash attention is one product of all queries with the keys of all answers, of which
    a mask throws most away: with 64 answers that is 64 times the work. A model that transformers would not run that way
    (its attention is capped, say) is left as it is.
    """
    if set(cache.cache_allocators) == {_KIND} and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # what it says follows from where the answers begin
    scaling: float | None = None,
    **paged: Any,
) -> tuple[torch.Tensor, None]:
    """Outputs of shape (1, tokens, heads, width) for queries of shape (1, heads, tokens, width).

    `paged` is what transformers passes: the cache, and where each answer's queries and keys begin.
    """
    # This also leaves, of the beginnings by kind of layer, those of this layer.
    keys, values = paged["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paged)
    group = query.shape[1] // keys.shape[1]
    outputs = []
    for (start, end), (first, last) in zip(
        pairwise(paged["cu_seq_lens_q"].tolist()), pairwise(paged["cu_seq_lens_k"].tolist()), strict=True
    ):
        outputs.append(
            _segment(query[:, :, start:end], keys[:, :, first:last], values[:, :, first:last], group, scaling)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, scaling: float | None
) -> torch.Tensor:
    """One answer's newest tokens, each of which sees all before it; `group` heads share their keys."""
    new, all_ = query.shape[2], keys.shape[2]
    if new == 1:  # heads that share keys stand as that many queries of one head
        packed = query.reshape(1, keys.shape[1], group, -1)
        return scaled_dot_product_attention(packed, keys, values, scale=scaling).reshape(query.shape)
    seen = torch.ones(new, all_, dtype=torch.bool, device=query.device).tril(all_ - new)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
