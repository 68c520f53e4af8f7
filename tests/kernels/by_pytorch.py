"""What the kernels compute, by PyTorch: takes their place where Triton is missing, and checks them where it is."""

from __future__ import annotations

import torch

__all__ = ["add_norm", "paged_decode"]


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    total = x.double() if residual is None else x.double() + residual.double()
    shift = None if bias is None else bias.double()
    return torch.nn.functional.layer_norm(total, x.shape[-1:], weight.double(), shift, eps).to(x.dtype)


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
    group = query.shape[1] // keys.shape[1]
    outputs = []
    for one, table, length in zip(query, tables, lengths.tolist(), strict=True):
        places = torch.arange(max(length - (window or length), 0), length, device=query.device)
        slots = table.long()[places // page] * page + places % page
        key, value = (stored[slots].repeat_interleave(group, 1).double() for stored in (keys, values))
        shares = (torch.einsum("hw,thw->ht", one.double(), key) * scale).softmax(-1)
        outputs.append(torch.einsum("ht,thv->hv", shares, value))
    return torch.stack(outputs).to(query.dtype)
