"""Run texts without padding: the tokens of a batch are one row, and attention runs within each text.

On a GPU in 16 bits, PyTorch's variable-length attention takes the row as it is. Elsewhere, texts of one length share a
call. In 16 bits on a CPU, attention is slow for lengths that are no multiple of 32, and for short ones. There it gets
tiles of the row: one or more texts of the same length, and what follows them in the row up to a multiple of 32. A mask
keeps them apart. Tiles are views of the row, which may overlap, so nothing is copied. Float32 gains nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from headrace.engines.networks import cpu_attention

_VARLEN = frozenset(inspect.signature(varlen_attn).parameters)
"""The arguments that this PyTorch's variable-length attention has."""

NAME = "headrace_packed"
"""The attention of models that can be called with a row."""
STARTS = "starts"
"""The input array with the start of each text in the row, and the end of the last; int32."""

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that PyTorch's variable-length attention supports on CUDA, and for which attention on a CPU gets tiles."""
_WIDEST_HEAD = 256
"""The most components of a head that variable-length attention takes; their number is a multiple of 8."""

_LENGTHS_PER_DOUBLING = 16
"""On a CPU, rows have one of 16 lengths between a power of two and the next: at most 6 % of a row is filling."""
_ALIGNED = 32
"""The width of a tile is a multiple of this: the numbers of 16 bits in a register of AVX-512."""
_WIDEST = 128
"""The most tokens of a tile that texts share."""
_KEPT_MASK = 1_024
"""Masks of up to this width are kept for the next batch."""

_FIRST, _LAST, _MEAN, _MAX = "cls", "lasttoken", "mean", "max"
POOLED = (_FIRST, _LAST, _MEAN, _MAX)
"""The ways of pooling by text, by their names in sentence-transformers."""


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
class RowPlan:
    """The boundaries of the texts of a row, as the host knows them."""

    starts: NDArray[np.int32]
    """The start of each text and the end of the last."""
    runs: list[EqualTexts]
    length: int
    """How long the row is: longer than its tokens if it is filled."""

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def longest(self) -> int:
        return max(run.length for run in self.runs)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row on its device."""

    plan: RowPlan
    starts: torch.Tensor

    def firsts(self) -> torch.Tensor:
        return self.starts[:-1]

    def lasts(self) -> torch.Tensor:
        return self.starts[1:] - 1


_ROW: ContextVar[PackedRow | None] = ContextVar("headrace_row", default=None)


def current() -> PackedRow | None:
    """The row that the model is called with; None if it is called with a padded batch."""
    return _ROW.get()


@contextmanager
def on_row(row: PackedRow) -> Iterator[None]:
    """Say that a model is called with this row."""
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


def called_with(
    call: Callable[[Mapping[str, torch.Tensor]], torch.Tensor], plan: RowPlan
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """The call, for the arrays of a row."""

    def run(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with on_row(PackedRow(plan, tensors[STARTS])):
            return call(tensors)

    return run


def plan_of(lengths: NDArray[np.integer], *, tiled: bool, filled: bool) -> RowPlan:
    """The boundaries of texts of these lengths. Neighbours of one length are a run, so equal ones should be neighbours.

    Args:
        lengths: at least one.
        tiled: whether attention gets tiles.
        filled: whether the row is filled, to one of few lengths.
    """
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    firsts = np.flatnonzero(np.diff(lengths, prepend=0))
    counts = np.diff(firsts, append=len(lengths))
    run_of = _tiled if tiled else EqualTexts
    runs = [run_of(*run) for run in zip(counts.tolist(), lengths[firsts].tolist(), strict=True)]
    length = int(starts[-1])
    if tiled:
        length = max(length, *(start + run.reach for start, run in zip(starts[firsts].tolist(), runs, strict=True)))
    return RowPlan(starts, runs, row_length(length) if filled else length)


def row_length(tokens: int) -> int:
    """The length that a row of this many tokens is filled to: a multiple of a sixteenth of the power of two below it.

    oneDNN compiles its kernels for a number of rows when it first meets it, which takes as long as a small batch.
    """
    step = max(1, (1 << (tokens.bit_length() - 1)) // _LENGTHS_PER_DOUBLING) if tokens else 1
    return -(-tokens // step) * step


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


def _mask(
    run: EqualTexts, width: int, window: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """What each token of a tile may attend to, to be added to the scores; None for everything.

    Shape (1, 1, width, width): a text attends to itself, and so do the tokens after the last text. (1, 1, 1, width) for
    one text, where nobody reads the outputs of the tokens after it. `window` is how many tokens before and after it a
    token may attend to; -1 for all.
    """
    length, shared = run.length, run.shared
    before, behind = (-1 if 0 <= length - 1 <= side else side for side in window)
    if width == length and before < 0 and behind < 0:
        return None
    made = _kept_mask if device.type == "cpu" and width <= _KEPT_MASK else _made_mask
    return made(length, shared, width, before, behind, dtype, device)


def _made_mask(  # noqa: PLR0913 - the key of the kept ones
    length: int, shared: int, width: int, before: int, behind: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    places = torch.arange(width, device=device)
    texts = (places // length).clamp(max=shared)
    within = before < 0 and behind < 0
    apart = texts[None, :] != (texts[:, None] if shared > 1 or not within else texts[:1, None])
    distance = places[None, :] - places[:, None]
    if before >= 0:
        apart = apart | (distance < -before)
    if behind >= 0:
        apart = apart | (distance > behind)
    return torch.zeros(apart.shape, dtype=dtype, device=device).masked_fill(apart, float("-inf"))[None, None]


_kept_mask = functools.lru_cache(maxsize=256)(_made_mask)


def attend(  # noqa: PLR0913 - the signature that transformers calls
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Outputs of shape (1, tokens, heads, width) for queries of shape (1, heads, tokens, width).

    Without a current row, the texts are padded as `attention_mask` says, and have the first dimension.

    Raises:
        ValueError: the model asks for something that is not computed for a row.
    """
    row = _ROW.get()
    if row is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **others
        )
        return output
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    window = _window(module, is_causal, sliding_window)
    tokens = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, width)
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and varlen_takes(query, window):
        return varlen(tokens, (row.starts, row.starts), (row.plan.longest,) * 2, scaling, window)[None], None
    if groups > 1:
        tokens[1:] = [states.repeat_interleave(groups, dim=1) for states in tokens[1:]]
    outputs, start = [], 0
    for run in row.plan.runs:
        outputs.append(_attend_run(tokens, run, start, scaling, window))
        start += run.count * run.length
    if start < len(tokens[0]):
        outputs.append(torch.zeros_like(tokens[0][start:]))  # nobody reads the filling
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _window(module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None) -> tuple[int, int]:
    """How many tokens before and after it a token attends to; -1 for all. Windows are counted as transformers does."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    side = -1 if sliding_window is None else sliding_window - 1
    return side, 0 if is_causal else side


def varlen_takes(query: torch.Tensor, window: tuple[int, int]) -> bool:
    """Whether PyTorch's variable-length attention computes this on a GPU."""
    width = query.shape[-1]
    fits = width <= _WIDEST_HEAD and width % 8 == 0
    return query.dtype in HALVES and fits and (window == (-1, -1) or "window_size" in _VARLEN)


def varlen(
    states: Sequence[torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """PyTorch's variable-length attention, in which some query heads share a key head.

    Args:
        states: queries, keys and values of shape (tokens, heads, width).
        starts: of each text among the queries, and among the keys; and the end of the last.
        longest: the most queries of a text, and keys.
    """
    query, key, value = states
    options: dict[str, object] = {} if window == (-1, -1) else {"window_size": window}
    group = query.shape[1] // key.shape[1]
    if group > 1 and "enable_gqa" in _VARLEN:
        options["enable_gqa"] = True
    elif group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    found: torch.Tensor = varlen_attn(query, key, value, *starts, *longest, scale=scale, **options)
    return found


def _attend_run(
    tokens: list[torch.Tensor], run: EqualTexts, start: int, scaling: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """Outputs of shape (tokens of the run, heads, width) for the row's queries, keys and values of that shape."""
    width = run.width or run.step
    queries, keys, values = (
        states[start:].as_strided(
            (run.tiles, states.shape[1], width, states.shape[2]),
            (run.step * states.stride(0), states.stride(1), states.stride(0), states.stride(2)),
        )
        for states in tokens
    )
    if window == (-1, 0) and width == run.length:
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling).transpose(1, 2)
        return output.flatten(0, 1)
    mask = _mask(run, width, window, queries.dtype, queries.device)
    if queries.device.type == "cpu":
        output = cpu_attention.attend(queries, keys, values, mask, scaling)
    else:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling).transpose(1, 2)
    return output[:, : run.step].flatten(0, 1)[: run.count * run.length]


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *places: int,
    device: torch.device | str = "cpu",
    **others: object,
) -> torch.Tensor | None:
    """The mask of a padded batch. Whether it could be left out is asked of a CPU alone: a GPU would have to be waited
    for."""
    if torch.device(device).type != "cpu":
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *places, device=device, **others)
    return mask


def use(model: torch.nn.Module) -> str:
    """Let a model be called with a row. Returns why it cannot; empty if it can be tried.

    On padded batches it computes what it did before.
    """
    if not isinstance(model, PreTrainedModel):
        return "it is not a model of transformers"
    base = model.base_model
    if base.config._attn_implementation not in ("sdpa", NAME):
        return f"its attention is {base.config._attn_implementation}, not PyTorch's"
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _padding_mask)
    base.set_attn_implementation(NAME)
    if "position_ids" not in _parameters(type(base).forward):
        return "it takes no positions of tokens"
    if base.config.output_hidden_states:
        return "its layers' outputs are asked for"
    return ""


def undo(model: PreTrainedModel) -> None:
    if model.base_model.config._attn_implementation == NAME:
        model.base_model.set_attn_implementation("sdpa")


def inputs(base: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    given: dict[str, object] = {name: tensor[None] for name, tensor in tensors.items() if name != STARTS}
    if first := _first_position(base):
        given["position_ids"] = tensors["position_ids"][None] + first
    # Models take a mask of four dimensions as it is. Nobody reads it.
    given["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tensors["input_ids"].device)
    if "use_cache" in _parameters(type(base).forward):
        given["use_cache"] = False
    return given


@functools.cache
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _first_position(base: PreTrainedModel) -> int:
    """The position of a text's first token: RoBERTa's are counted after that of the padding."""
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def states(base: PreTrainedModel, tensors: Mapping[str, torch.Tensor], row: PackedRow) -> torch.Tensor:
    """The last hidden states of the tokens of a row; shape (tokens, components)."""
    found: torch.Tensor = base(**inputs(base, tensors)).last_hidden_state
    return found[0, : row.plan.tokens]


def pooled(found: torch.Tensor, row: PackedRow, mode: str) -> torch.Tensor:
    """One vector for each text from the states of all tokens, by one of `POOLED`."""
    if mode == _FIRST:
        return found[row.firsts()]
    if mode == _LAST:
        return found[row.lasts()]
    tokens = torch.arange(len(found), dtype=row.starts.dtype, device=found.device)
    vectors: torch.Tensor = embedding_bag(tokens, found, row.starts, mode=mode, include_last_offset=True)
    return vectors


_LAYERS = ("encoder", "transformer")
"""Attribute names of the module that holds all layers, which comes before a pooling layer."""


def first_states(base: PreTrainedModel) -> None:
    """Let a model's layers give only the state of each text's first token of a row, as a batch of texts of one token.

    What follows them, such as the head of a classifier, reads no other.
    """
    held = (getattr(base, name, None) for name in _LAYERS)
    layers = next((one for one in held if isinstance(one, torch.nn.Module)), base)
    layers.register_forward_hook(_first_states)


def _first_states(_: torch.nn.Module, __: object, output: object) -> object:
    row = _ROW.get()
    if row is not None:
        output.last_hidden_state = output.last_hidden_state[0, row.firsts()][:, None]  # type: ignore[attr-defined]
    return output
