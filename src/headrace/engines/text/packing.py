"""Run encoder layers without padding: a batch's real tokens form one row, and attention runs per text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older PyTorch
    varlen_attn = None

NAME = "headrace_packed"

_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that PyTorch's variable-length attention supports, on CUDA only."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The boundaries of the texts in the row."""

    runs: list[tuple[int, int]]
    """(count, length) of consecutive texts with the same length, which share one attention call."""
    starts: torch.Tensor
    """The start of each text and the end of the last; int32."""


class PackedEncoder(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """Wraps an encoder: takes a padded batch and runs the layers on one row of its real tokens.

    Args:
        encoder: calls its layers with hidden states, passes further keyword arguments on to attention, and returns an
            object with `last_hidden_state`.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: object
    ) -> object:
        """The encoder's output for hidden states of shape (texts, longest, components); padding is 0.

        `attention_mask` has shape (texts, longest), or is None if nothing is padded.
        """
        if attention_mask is None:
            return self.encoder(hidden_states, None, **others)
        lengths = attention_mask.sum(1)
        order = lengths.argsort(descending=True, stable=True)
        real = attention_mask[order].flatten().nonzero().squeeze(1)
        longest = hidden_states.shape[1]
        places = order[real // longest] * longest + real % longest
        ordered = lengths[order]
        runs = [(len(list(same)), length) for length, same in groupby(ordered.tolist())]
        texts = RaggedBatch(runs, torch.nn.functional.pad(ordered.cumsum(0), (1, 0)).int())
        flat = hidden_states.flatten(0, 1)
        output = self.encoder(flat[places][None], None, headrace_texts=texts, **others)
        found = output.last_hidden_state[0]
        whole = found.new_zeros(len(flat), found.shape[1])
        whole[places] = found
        output.last_hidden_state = whole.view(*hidden_states.shape[:2], -1)
        return output


def attend(  # noqa: PLR0913 - the signature that transformers calls
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # `headrace_texts` has the same information
    scaling: float | None = None,
    headrace_texts: RaggedBatch | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Outputs of shape (1, tokens, heads, width) for queries of shape (1, heads, tokens, width).

    `headrace_texts` comes from `PackedEncoder`. Without it, all texts have the same length.
    """
    if headrace_texts is None:
        output = scaled_dot_product_attention(query, key, value, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    tokens = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, width)
    if varlen_attn is not None and query.is_cuda and query.dtype in _HALVES:
        longest = headrace_texts.runs[0][1]
        packed = varlen_attn(*tokens, headrace_texts.starts, headrace_texts.starts, longest, longest, scale=scaling)
        return packed[None], None
    outputs, start = [], 0
    for count, length in headrace_texts.runs:
        end = start + count * length
        queries, keys, values = (states[start:end].unflatten(0, (count, length)).transpose(1, 2) for states in tokens)
        output = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(outputs)[None], None


def register() -> None:
    """Register `attend` with transformers, with the mask format that `PackedEncoder` takes."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # the batch's padding mask, or None
