"""GPU kernels in Triton, which comes with PyTorch's CUDA builds for Linux. Imported only where they are used.

On a CPU, they run in Triton's interpreter, for tests: set `TRITON_INTERPRET=1` before the import.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from headrace.errors import first_line

_KEYS_AT_ONCE = 64
"""Keys that a program of `paged_decode` reads at a time."""
_QUERIES = 16
"""The least rows of a matrix product: queries that share a key head are filled up to them."""
_PROGRAMS = 512
"""About the number of programs of `paged_decode` that keeps a GPU busy. Fewer answers are split into as many parts."""
_LEAST_SPLIT = 256
"""Keys of a part of an answer, at least."""


@triton.jit
def _add_norm_kernel(
    x, residual, weight, bias, out, width, eps, ADDS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    within = at < width
    value = tl.load(x + row + at, mask=within, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row + at, mask=within, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / width
    centred = tl.where(within, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    found = centred * scale * tl.load(weight + at, mask=within, other=0.0).to(tl.float32)
    if BIASED:
        found += tl.load(bias + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row + at, found.to(out.dtype.element_ty), mask=within)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm of `x` plus `residual`, over the last dimension (Ba et al., 2016, https://arxiv.org/abs/1607.06450).

    The sum is not rounded to the dtype of `x` before it is normalised.

    Raises:
        RuntimeError: Triton cannot make the kernel.
    """
    width = x.shape[-1]
    # By calls of PyTorch: a graph keeps what they read, and does not see a kernel's arguments.
    x, weight, bias = x.contiguous(), weight.detach(), None if bias is None else bias.detach()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    grid = (x.numel() // width,)
    if not grid[0]:
        return out
    try:
        _add_norm_kernel[grid](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            weight if bias is None else bias,
            out,
            width,
            eps,
            ADDS=residual is not None,
            BIASED=bias is not None,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 8),
        )
    except TritonError as error:
        raise RuntimeError(f"a kernel cannot be made: {first_line(error)}") from error
    return out


@triton.jit
def _rows(start, places, row, seen, wide, WIDTH: tl.constexpr):
    """Some rows of a matrix, with zeros for those that are not seen and beyond their width."""
    within = seen[:, None] & (wide[None, :] < WIDTH)
    return tl.load(start + places[:, None] * row + wide[None, :], mask=within, other=0.0)


@triton.jit(do_not_specialize=["window", "table_width"])  # they vary from step to step, and compiling takes seconds
def _decode_kernel(
    query, keys, values, tables, lengths, out, sums, largest,
    scale, window, table_width, query_row, query_head, key_row, key_head, value_row, value_head,
    SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    answer = tl.program_id(0)
    key_place = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    heads = key_place * SHARED + rows
    wide = tl.arange(0, WIDE)
    value_wide = tl.arange(0, VALUE_WIDE)
    q = _rows(query + answer * query_row, heads, query_head, rows < SHARED, wide, WIDTH)
    length = tl.load(lengths + answer)
    first = tl.maximum(length - window, 0)
    each = tl.cdiv(tl.cdiv(length - first, tl.num_programs(2)), BLOCK) * BLOCK
    begin = first + part * each
    end = tl.minimum(begin + each, length)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, VALUE_WIDE), tl.float32)
    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = places < end
        page = tl.load(tables + answer * table_width + places // PAGE, mask=seen, other=0).to(tl.int64)
        slot = page * PAGE + places % PAGE
        k = _rows(keys + key_place * key_head, slot, key_row, seen, wide, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        kept = tl.exp(most - higher)
        weights = tl.exp(scores - higher[:, None])
        v = _rows(values + key_place * value_head, slot, value_row, seen, value_wide, VALUE_WIDTH)
        found = found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        most = higher
    place = (part * tl.num_programs(0) + answer) * HEADS + heads
    real = rows < SHARED
    if SPLITS:
        tl.store(sums + place, total, mask=real)
        tl.store(largest + place, most, mask=real)
    else:
        found = found / total[:, None]
    tl.store(
        out + place[:, None] * VALUE_WIDTH + value_wide[None, :],
        found.to(out.dtype.element_ty),
        mask=real[:, None] & (value_wide[None, :] < VALUE_WIDTH),
    )


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    page: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one new token of each answer to all its keys, which lie in pages; nothing is gathered.

    Keys are read once for all queries that share them, with the running sum of softmax (Milakov and Gimelshein, 2018,
    https://arxiv.org/abs/1805.02867). No work depends on what the tensors hold, so a CUDA graph can capture it.

    Args:
        query: shape (answers, heads, width).
        keys: shape (pages * page, key heads, width), with the new ones.
        values: shape (pages * page, key heads, value width).
        tables: the pages of each answer, of shape (answers, pages of the longest), int32.
        lengths: how many keys each answer has, with the new one; int32, at least 1.
        page: tokens per page.
        scale: of the scores.
        window: the last keys that count; None for all.

    Returns:
        Shape (answers, heads, value width).

    Raises:
        RuntimeError: Triton cannot make the kernel.
    """
    answers, heads, width = query.shape
    key_heads, value_width = values.shape[1:]
    most = tables.shape[1] * page
    parts = max(min(_PROGRAMS // (answers * key_heads), most // _LEAST_SPLIT), 1)
    dtype = query.dtype if parts == 1 else torch.float32
    out = torch.empty(parts, answers, heads, value_width, dtype=dtype, device=query.device)
    sums, largest = torch.empty(2, parts, answers, heads, dtype=torch.float32, device=query.device)
    shared = heads // key_heads
    try:
        _decode_kernel[(answers, key_heads, parts)](
            query, keys, values, tables, lengths, out, sums, largest,
            scale, most if window is None else window, tables.stride(0), query.stride(0), query.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            SHARED=shared, HEADS=heads, WIDTH=width, VALUE_WIDTH=value_width, PAGE=page,
            WIDE=max(triton.next_power_of_2(width), 16), VALUE_WIDE=max(triton.next_power_of_2(value_width), 16),
            ROWS=max(triton.next_power_of_2(shared), _QUERIES), BLOCK=_KEYS_AT_ONCE, SPLITS=parts > 1,
        )  # fmt: skip
    except TritonError as error:
        raise RuntimeError(f"a kernel cannot be made: {first_line(error)}") from error
    if parts == 1:
        return out[0]
    weights = torch.exp(largest - largest.amax(0))
    total = (weights * sums).sum(0)
    return ((out * weights[..., None]).sum(0) / total[..., None]).to(query.dtype)
