"""A language model's own forward pass over keys and values in pages, for several answers at once.

The model's modules compute all but attention, which transformers' public `AttentionInterface` hands to this module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from headrace.device.streams import to_device
from headrace.engines.networks.packing import varlen, varlen_takes

NAME = "headrace_paged"
PAGE = 32
"""Tokens per page of the key-value cache."""
_FLASH_SINCE = (8, 0)
"""The compute capability that FlashAttention needs."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a step computes for one answer."""

    ids: list[int]
    """The new tokens."""
    known: int
    """Tokens before them, whose keys and values are stored."""
    pages: list[int]
    """The pages of all of them."""
    chooses: bool
    """Whether the next token is chosen after these."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The keys and values of one attention for one token."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    window: int | None
    """Tokens that a token attends to; None for all."""

    @property
    def token_bytes(self) -> int:
        """What a token takes in the cache."""
        return self.heads * (self.key_width + self.value_width) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a model's attention asks for: queries, keys and values of shape (1, heads, tokens, width)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether it is what kernels compute."""
        return self.softcap is None and self.sinks is None


Attending: TypeAlias = Callable[[AttentionCall], torch.Tensor]
"""Computes the attentions of one forward pass, in the order in which the model calls them: outputs of shape
(1, tokens, heads, width)."""


def _attend(  # noqa: PLR0913 - the signature that transformers calls
    module: torch.nn.Module,  # noqa: ARG001 - the order of the calls says which one it is
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - each answer attends to its own tokens
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    headrace_paged: Attending | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    if headrace_paged is None:
        raise ValueError("its layers do not pass on what their attention needs")
    if others.get("position_bias") is not None:
        raise ValueError("its attention adds a bias to positions")
    return headrace_paged(AttentionCall(query, key, value, scaling, sliding_window, softcap, s_aux)), None


def use_paged_attention(model: PreTrainedModel) -> None:
    """Let all attentions of a model be computed by what `forward` is given."""
    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def forward(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, attending: Attending
) -> torch.Tensor:
    """The logits after some of the tokens, of shape (those, vocabulary).

    Args:
        model: after `use_paged_attention`.
        ids: all tokens, of shape (tokens,).
        positions: of each in its answer.
        last: the places of those whose logits are wanted.
        attending: computes the attentions.
    """
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    more = {"logits_to_keep": last} if keeps else {}
    found = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{NAME: attending}, **more)
    logits: torch.Tensor = found.logits[0]
    return logits if keeps else logits[last]


class ShapeProbe:
    """Notes what each attention of a forward pass stores; computes nothing."""

    def __init__(self) -> None:
        self.shapes: list[AttentionShape] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return zeros in the shape of the attention's output."""
        _, heads, tokens, width = call.key.shape
        value_width = call.value.shape[-1]
        self.shapes.append(AttentionShape(heads, width, value_width, call.key.dtype, call.window))
        return call.query.new_zeros(1, tokens, call.query.shape[1], value_width)


Stored: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class PagedModel:
    """A model with its key-value cache.

    On a CPU, each answer's attention is computed by itself: its time is that of its own keys. On another device, one
    kernel reads the pages of all answers that have one new token each; without it, their keys are gathered and padded.
    The keys of the others are gathered for FlashAttention over texts of different lengths, where it runs.

    Args:
        model: after `use_paged_attention`.
        shapes: of its attentions.
        pages: how many there are. One more is made, which belongs to no answer.
        gathers: whether keys are gathered; None for what suits the device.
        kernels: whether there are Headrace's own kernels for the device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[AttentionShape],
        pages: int,
        *,
        gathers: bool | None = None,
        kernels: bool = False,
    ) -> None:
        self.model = model
        self.device = model.device
        self.gathers = self.device.type != "cpu" if gathers is None else gathers
        self.has_varlen = self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) >= _FLASH_SINCE
        self.kernels = kernels
        self.spare_page = pages
        with torch.inference_mode():
            self.layers: list[Stored] = [
                (
                    torch.empty(rows, shape.heads, shape.key_width, dtype=shape.dtype, device=self.device),
                    torch.empty(rows, shape.heads, shape.value_width, dtype=shape.dtype, device=self.device),
                )
                for shape in shapes
                for rows in [(pages + 1) * PAGE]
            ]

    def run(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Compute a step; the logits after each part that chooses a token, of shape (those, vocabulary)."""
        step = _PagedStep(self, parts)
        return forward(self.model, step.ids, step.positions, step.last, step.attend)


class _PagedStep:
    """The attentions of one step, and what it gives the model."""

    def __init__(self, paged: PagedModel, parts: Sequence[StepPart]) -> None:
        self._paged, self._parts, self._layers = paged, parts, iter(paged.layers)
        self._lengths = [len(part.ids) for part in parts]
        self._counts = [part.known + len(part.ids) for part in parts]
        spans = [range(part.known, count) for part, count in zip(parts, self._counts, strict=True)]
        slots = [
            part.pages[position // PAGE] * PAGE + position % PAGE
            for part, span in zip(parts, spans, strict=True)
            for position in span
        ]
        ends = list(accumulate(self._lengths))
        most = max(len(part.pages) for part in parts)
        lists = (
            [token for part in parts for token in part.ids],
            [position for span in spans for position in span],
            slots,
            [end - 1 for part, end in zip(parts, ends, strict=True) if part.chooses],
            [page for part in parts for page in (*part.pages, *[part.pages[0]] * (most - len(part.pages)))],
            self._counts,
            [0, *ends],
        )
        host = torch.tensor([number for numbers in lists for number in numbers])
        moved = to_device(host, paged.device).split([len(one) for one in lists])  # by one copy
        self.ids, self.positions, self._slots, self.last, tables, self._on_device, self._starts = moved
        self._tables = tables.view(len(parts), most)
        """The pages of each part, of shape (parts, pages)."""
        singles = next((n for n, length in enumerate(self._lengths) if length > 1), len(parts))
        fits = singles * max(self._counts) <= len(paged.layers[0][0])  # in the memory left for what is gathered
        self._singles = singles if paged.gathers and (fits or paged.kernels) else 0
        self._packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._padded_by: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the new keys and values; outputs of shape (1, tokens, heads, width)."""
        stored = next(self._layers)
        store(call, stored, self._slots)
        outputs = []
        at = begin = self._singles
        if begin:
            if self._paged.kernels and call.is_plain:
                outputs.append(decode(call, stored, begin, self._tables32, self._counts32))
            else:
                outputs.append(self._padded(call, stored)[0].transpose(0, 1))
        if begin < len(self._parts) and self._paged.gathers and self._takes_varlen(call):
            outputs.append(self._varlen(call, stored, begin))
            begin = len(self._parts)
        for part in range(begin, len(self._parts)):
            end = at + self._lengths[part]
            outputs.append(self._alone(call, stored, part, slice(at, end))[0].transpose(0, 1))
            at = end
        return torch.cat(outputs)[None]

    @functools.cached_property
    def _tables32(self) -> torch.Tensor:
        return self._tables.int()

    @functools.cached_property
    def _counts32(self) -> torch.Tensor:
        return self._on_device.int()

    def _takes_varlen(self, call: AttentionCall) -> bool:
        is_usual = call.is_plain and call.key.shape[-1] == call.value.shape[-1]
        return self._paged.has_varlen and is_usual and varlen_takes(call.query, (-1, 0))

    def _varlen(self, call: AttentionCall, stored: Stored, begin: int) -> torch.Tensor:
        """The parts from `begin` in one kernel, over the keys of each one after the other."""
        if self._packed is None:
            lengths, tables = self._on_device[begin:], self._tables[begin:]
            total = sum(self._counts[begin:])
            device = self._slots.device
            starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            rows = torch.arange(len(tables), device=device).repeat_interleave(lengths, output_size=total)
            offsets = torch.arange(total, device=device) - starts[rows]
            places = tables[rows, offsets // PAGE] * PAGE + offsets % PAGE
            self._packed = places, (self._starts[begin:] - begin).int(), starts.int()
        places, queries, starts = self._packed
        keys, values = (one.index_select(0, places) for one in stored)
        new = call.query[0, :, begin:].transpose(0, 1).contiguous()
        longest = max(self._lengths[begin:]), max(self._counts[begin:])
        window = -1 if call.window is None else call.window - 1, 0
        return varlen((new, keys, values), (queries, starts), longest, call.scaling, window)

    def _padded(self, call: AttentionCall, stored: Stored) -> torch.Tensor:
        """The first parts, which have one new token each, in one kernel; of shape (1, heads, tokens, width)."""
        count = self._singles
        if call.window not in self._padded_by:
            longest = -(-max(self._counts[:count]) // 16) * 16
            lengths = self._on_device[:count, None]
            offsets = torch.arange(longest, device=self._slots.device).expand(count, -1)
            seen = offsets < lengths
            if call.window is not None:
                seen = seen & (offsets >= lengths - call.window)
            offsets = offsets.minimum(lengths - 1)  # what is not written yet may be no number
            places = self._tables[:count].gather(1, offsets // PAGE) * PAGE + offsets % PAGE
            self._padded_by[call.window] = places, seen[:, None, None]
        places, seen = self._padded_by[call.window]
        keys, values = (one[places].transpose(1, 2) for one in stored)
        return _attention(call, call.query[:, :, :count].transpose(0, 2), keys, values, seen).transpose(0, 2)

    def _alone(self, call: AttentionCall, stored: Stored, part: int, tokens: slice) -> torch.Tensor:
        """One part, of shape (1, heads, tokens, width)."""
        query = call.query[:, :, tokens]
        new, count = self._lengths[part], self._counts[part]
        if new == count:  # nothing of it was stored before
            keys, values = call.key[:, :, tokens], call.value[:, :, tokens]
            first = 0
        else:
            first = 0 if call.window is None else max(count - new + 1 - call.window, 0) // PAGE * PAGE
            table = self._tables[part, first // PAGE : -(-count // PAGE)]
            keys, values = (_read(one, table, count - first) for one in stored)
        seen = None
        window = call.window if call.window is not None and call.window < count else None
        if new == count and window is None and call.is_plain:
            return _attention(call, query, keys, values, None, is_causal=new > 1)
        if new > 1 or window is not None:
            own = torch.arange(count - new, count, device=query.device)[:, None]
            other = torch.arange(first, count, device=query.device)
            seen = other <= own
            if window is not None:
                seen &= other > own - window
        return _attention(call, query, keys, values, seen)


def store(call: AttentionCall, stored: Stored, slots: torch.Tensor) -> None:
    """Write the new keys and values of an attention to these places of the cache."""
    for new, kept in zip((call.key, call.value), stored, strict=True):
        kept.index_copy_(0, slots, new[0].transpose(0, 1))


def decode(
    call: AttentionCall, stored: Stored, count: int, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Attention of the first `count` answers, which have one new token each, over their pages.

    Returns:
        Shape (count, heads, width).
    """
    from headrace.device.kernels import paged_decode  # Triton is not there for every device

    query = call.query[0, :, :count].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    found: torch.Tensor = paged_decode(query, *stored, tables[:count], lengths[:count], PAGE, scale, call.window)
    return found


def _read(stored: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` keys or values of some pages, of shape (1, heads, count, width)."""
    pages = stored.view(-1, PAGE, *stored.shape[1:]).index_select(0, table)
    return pages.flatten(0, 1)[:count].transpose(0, 1).unsqueeze(0)


def _attention(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of shape (batch, heads, queries, width), in which some query heads share a key head.

    Args:
        call: its scale, cap and sinks.
        query: of shape (batch, heads, queries, width).
        keys: of shape (batch, key heads, keys, width).
        values: likewise.
        seen: which keys each query attends to; None for all.
        is_causal: whether each attends to the keys up to its own.
    """
    batch, heads, new, _ = query.shape
    group = heads // keys.shape[1]
    if call.is_plain and new == 1:  # treat the heads that share keys as queries of one head
        packed = query.reshape(batch, keys.shape[1], group, -1)
        found = scaled_dot_product_attention(packed, keys, values, attn_mask=seen, scale=call.scaling)
        return found.reshape(batch, heads, 1, -1)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if call.is_plain:
        return scaled_dot_product_attention(query, keys, values, seen, is_causal=is_causal, scale=call.scaling)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if call.scaling is None else call.scaling)
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.reshape(1, -1, 1, 1).expand(batch, -1, new, -1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    shares = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[2]]
    return shares.to(values.dtype) @ values
