"""Run encoder layers without padding: a batch's real tokens form one row, and attention runs per text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from headrace.device.streams import to_device
from headrace.engines.networks.pytorch import HOST_MASK

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older PyTorch
    varlen_attn = None

NAME = "headrace_packed"

_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that PyTorch's variable-length attention supports, on CUDA only."""

_LENGTHS_PER_DOUBLING = 16
"""On a CPU, rows have one of so many lengths between a power of two and the next: at most 6 % of a row is filling."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The boundaries of the texts in the row."""

    runs: list[tuple[int, int]]
    """(count, length) of consecutive texts with the same length, which share one attention call."""
    starts: torch.Tensor
    """The start of each text and the end of the last; int32."""


class PackedEncoder(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """Wraps an encoder: takes a padded batch and runs the layers on one row of its real tokens.

    Where the tokens are comes from `HOST_MASK`. Without it, the layers run on the padded batch. On a CPU, batches
    without padding become a row too, and a row is filled up to `row_length`.

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
        mask = HOST_MASK.get()
        known = mask is not None and mask.shape == hidden_states.shape[:2]
        on_cpu = hidden_states.device.type == "cpu"
        if attention_mask is None and not (known and on_cpu):
            return self.encoder(hidden_states, None, **others)
        if mask is None or not known:
            padded = None if attention_mask is None else attention_mask[:, None, None, :]
            return self.encoder(hidden_states, padded, **others)
        lengths = mask.sum(1)
        order = np.argsort(-lengths, kind="stable")
        places = _places(mask, order)
        tokens = len(places)
        if on_cpu:
            places = np.pad(places, (0, row_length(tokens) - tokens))  # with the first token
        texts = _ragged(lengths[order], hidden_states.device)
        flat = hidden_states.flatten(0, 1)
        indices = to_device(places, hidden_states.device)
        output = self.encoder(flat[indices][None], None, headrace_texts=texts, **others)
        found = output.last_hidden_state[0, :tokens]
        whole = found.new_zeros(len(flat), found.shape[1])
        whole[indices[:tokens]] = found
        output.last_hidden_state = whole.view(*hidden_states.shape[:2], -1)
        return output


def row_length(tokens: int) -> int:
    """The length that a row of this many tokens is filled to: a multiple of a sixteenth of the power of two below it.

    oneDNN compiles its kernels for a number of rows when it first meets it, which takes as long as a small batch.
    """
    step = max(1, (1 << (tokens.bit_length() - 1)) // _LENGTHS_PER_DOUBLING) if tokens else 1
    return -(-tokens // step) * step


def _places(mask: NDArray[np.generic], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the real tokens of the texts are in the flattened batch, text after text in this order."""
    longest = mask.shape[1]
    real = np.flatnonzero(mask[order])
    places: NDArray[np.int64] = order[real // longest] * longest + real % longest
    return places


def _ragged(lengths: NDArray[np.int64], device: torch.device) -> RaggedBatch:
    """The boundaries of texts of these lengths, which descend."""
    values, counts = np.unique(-lengths, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return RaggedBatch(list(zip(counts.tolist(), (-values).tolist(), strict=True)), to_device(starts, device))


def attend(  # noqa: PLR0913 - the signature that transformers calls
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    headrace_texts: RaggedBatch | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Outputs of shape (1, tokens, heads, width) for queries of shape (1, heads, tokens, width).

    `headrace_texts` comes from `PackedEncoder`. Without it, the texts are padded as `attention_mask` says.
    """
    if headrace_texts is None:
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
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
    if start < len(tokens[0]):
        outputs.append(torch.zeros_like(tokens[0][start:]))  # nobody reads the filling
    return torch.cat(outputs)[None], None


def _padding_mask(*_: object, attention_mask: torch.Tensor | None = None, **__: object) -> torch.Tensor | None:
    """The batch's padding mask, or None if nothing is padded. `flash_attention_mask` would ask the device for that."""
    mask = HOST_MASK.get()
    return None if mask is not None and mask.all() else attention_mask


def register() -> None:
    """Register `attend` with transformers, with the mask format that `PackedEncoder` takes."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _padding_mask)
