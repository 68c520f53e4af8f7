"""Run encoder layers without padding: a batch's real tokens form one row, and attention runs per text.

In 16 bits on a CPU, attention is slow for lengths that are no multiple of 32, and for short ones. There it gets tiles
of the row: one or more texts of the same length, and what follows them in the row up to a multiple of 32. A mask keeps
them apart. Tiles are views of the row, which may overlap, so nothing is copied. Float32 gains nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from headrace.device.streams import to_device
from headrace.engines.networks import cpu_attention
from headrace.engines.networks.pytorch import HOST_MASK

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older PyTorch
    varlen_attn = None

NAME = "headrace_packed"

_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that PyTorch's variable-length attention supports on CUDA, and for which attention on a CPU gets tiles."""

_LENGTHS_PER_DOUBLING = 16
"""On a CPU, rows have one of 16 lengths between a power of two and the next: at most 6 % of a row is filling."""
_ALIGNED = 32
"""The width of a tile is a multiple of this: the numbers of 16 bits in a register of AVX-512."""
_WIDEST = 128
"""The most tokens of a tile that texts share."""


@dataclass(frozen=True, slots=True)
class EqualTexts:
    """Consecutive texts of one length, which share one attention call."""

    count: int
    length: int
    """Tokens of each text."""
    shared: int = 1
    """Texts in a tile."""
    width: int = 0
    """Tokens of a tile; 0 for those of its texts."""

    @property
    def tiles(self) -> int:
        """How many tiles hold the texts. The last may hold fewer than the others."""
        return -(-self.count // self.shared)

    @property
    def step(self) -> int:
        """Tokens from the start of a tile to that of the next."""
        return self.shared * self.length

    @property
    def reach(self) -> int:
        """Tokens from the start of the first tile to the end of the last."""
        return (self.tiles - 1) * self.step + (self.width or self.step)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The boundaries of the texts in the row."""

    runs: list[EqualTexts]
    starts: torch.Tensor
    """The start of each text and the end of the last; int32."""
    reach: int
    """How long the row must be at least, so that it holds all tiles."""


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
        tiled = on_cpu and hidden_states.dtype in _HALVES
        texts = ragged(lengths[order], hidden_states.device, tiled=tiled)
        if on_cpu:
            places = np.pad(places, (0, row_length(texts.reach) - tokens))  # with the first token
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


def ragged(lengths: NDArray[np.int64], device: torch.device, *, tiled: bool) -> RaggedBatch:
    """The boundaries of texts of these lengths, which descend, and the tiles if `tiled`."""
    values, counts = np.unique(-lengths, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    run_of = _tiled if tiled else EqualTexts
    runs = [run_of(*run) for run in zip(counts.tolist(), (-values).tolist(), strict=True)]
    reach, start = 0, 0
    for run in runs:
        reach = max(reach, start + run.reach)
        start += run.count * run.length
    return RaggedBatch(runs, to_device(starts, device), reach)


@functools.lru_cache(maxsize=4_096)
def _tiled(count: int, length: int) -> EqualTexts:
    """The tiles for `count` texts of this length that are likely to take the least time."""
    most = max(1, min(count, _WIDEST // length))
    runs = [
        EqualTexts(count, length, shared, -(-shared * length // _ALIGNED) * _ALIGNED) for shared in range(1, most + 1)
    ]
    return min(runs, key=lambda run: run.tiles * _tile_time(run.width))


def _tile_time(width: int) -> float:
    """About how long attention takes for a tile, in times of an empty one, as measured in bfloat16 with AVX-512."""
    return 1.0 + 0.08 * width + 0.002 * width**2


@functools.lru_cache(maxsize=256)
def _tile_mask(length: int, shared: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What each token of a tile may attend to, to be added to the scores; None for everything.

    Shape (1, 1, width, width): a text attends to itself, and so do the tokens after the last text. (1, 1, 1, width) for
    one text, where nobody reads the outputs of the tokens after it.
    """
    if width == length:
        return None
    texts = (torch.arange(width) // length).clamp(max=shared)
    apart = texts[None, :] != (texts[:, None] if shared > 1 else texts[:1, None])
    return torch.zeros(apart.shape, dtype=dtype).masked_fill(apart, float("-inf"))[None, None]


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
        longest = headrace_texts.runs[0].length
        packed = varlen_attn(*tokens, headrace_texts.starts, headrace_texts.starts, longest, longest, scale=scaling)
        return packed[None], None
    outputs, start = [], 0
    for run in headrace_texts.runs:
        outputs.append(_attend_run(tokens, run, start, scaling))
        start += run.count * run.length
    if start < len(tokens[0]):
        outputs.append(torch.zeros_like(tokens[0][start:]))  # nobody reads the filling
    return torch.cat(outputs)[None], None


def _attend_run(tokens: list[torch.Tensor], run: EqualTexts, start: int, scaling: float | None) -> torch.Tensor:
    """Outputs of shape (tokens of the run, heads, width) for the row's queries, keys and values of that shape."""
    width = run.width or run.step
    queries, keys, values = (
        states[start:].as_strided(
            (run.tiles, states.shape[1], width, states.shape[2]),
            (run.step * states.stride(0), states.stride(1), states.stride(0), states.stride(2)),
        )
        for states in tokens
    )
    mask = _tile_mask(run.length, run.shared, width, tokens[0].dtype)
    if queries.device.type == "cpu":
        output = cpu_attention.attend(queries, keys, values, mask, scaling)
    else:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling).transpose(1, 2)
    return output[:, : run.step].flatten(0, 1)[: run.count * run.length]


def _padding_mask(*_: object, attention_mask: torch.Tensor | None = None, **__: object) -> torch.Tensor | None:
    """The batch's padding mask, or None if nothing is padded. `flash_attention_mask` would ask the device for that."""
    mask = HOST_MASK.get()
    return None if mask is not None and mask.all() else attention_mask


def register() -> None:
    """Register `attend` with transformers, with the mask format that `PackedEncoder` takes."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _padding_mask)
