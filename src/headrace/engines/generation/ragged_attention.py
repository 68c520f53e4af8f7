"""Attention over concatenated answers, each only to its own tokens, for devices without flash attention."""

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


def use_ragged_attention(model: PreTrainedModel, cache: PagedAttentionCache) -> bool:
    """Run attention over a paged cache per answer, in a model whose layers all have full attention.

    Without flash attention, transformers multiplies all queries with the keys of all answers and masks most of the
    result: with 64 answers, that is 64 times the work. A model that does not use SDPA is not changed. Returns whether
    it was changed; `cache.page_tables` must then hold the pages of each answer before a step.
    """
    if set(cache.cache_allocators) != {_KIND} or model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    return True


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # `cu_seq_lens` has the same information
    scaling: float | None = None,
    **paged: Any,
) -> tuple[torch.Tensor, None]:
    """Outputs of shape (1, tokens, heads, width) for queries of shape (1, heads, tokens, width).

    transformers passes `paged`: the cache, and the start of each answer's queries and keys.
    """
    cache, layer = paged["cache"], module.layer_idx
    # Stores the new keys and values, and replaces the starts by layer type in `paged` with those of this layer.
    cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=paged)
    pages = cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
    group = query.shape[1] // key.shape[1]
    outputs = []
    for (start, end), (first, last), table in zip(
        pairwise(paged["cu_seq_lens_q"].tolist()),
        pairwise(paged["cu_seq_lens_k"].tolist()),
        cache.page_tables,
        strict=True,
    ):
        if last - first == end - start:  # nothing of it was stored before
            keys, values = key[:, :, start:end], value[:, :, start:end]
        else:
            keys, values = (_read(stored, table, last - first) for stored in pages)
        outputs.append(_segment(query[:, :, start:end], keys, values, group, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _read(stored: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` keys or values of an answer, of shape (1, heads, count, width)."""
    return stored.index_select(0, table).flatten(0, 1)[:count].transpose(0, 1).unsqueeze(0)


def _segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, scaling: float | None
) -> torch.Tensor:
    """Causal attention of one answer's new tokens; `group` query heads share each key head."""
    new, all_ = query.shape[2], keys.shape[2]
    if new == 1:  # treat the heads that share keys as queries of one head
        packed = query.reshape(1, keys.shape[1], group, -1)
        return scaled_dot_product_attention(packed, keys, values, scale=scaling).reshape(query.shape)
    seen = torch.ones(new, all_, dtype=torch.bool, device=query.device).tril(all_ - new)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
