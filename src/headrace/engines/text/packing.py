"""Encoder layers without padding: a batch's real tokens stand in one row, and attention runs text by text."""

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
"""The numbers that PyTorch's variable-length attention takes, on CUDA alone."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which tokens of the row belong together."""

    runs: list[tuple[int, int]]
    """How many texts in turn are how long: of one length they are attended to in one call."""
    starts: torch.Tensor
    """Where each text begins, and where the last one ends; int32."""


class PackedEncoder(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """A model's encoder that takes a padded batch, and runs its layers on a row of the real tokens.

    Args:
        encoder: calls its layers with hidden states, passes further keyword arguments on to attention, and gives an
            object with `last_hidden_state`.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: object
    ) -> object:
        """What the encoder gives for hidden states of shape (texts, longest, components); 0 in place of padding.

        `attention_mask` is of shape (texts, longest), or None where nothing is padded.
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
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # what it says is in the texts
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
    """Make `attend` known to transformers, with masks as `PackedEncoder` takes them."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # the padding of the batch as it came, or None
