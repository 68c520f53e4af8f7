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
    """Nothing is read by the host, as in a graph."""
    group, most = query.shape[1] // keys.shape[1], tables.shape[1] * page
    at = torch.arange(most, device=query.device)
    seen = (at < lengths[:, None]) & (at >= lengths[:, None] - (window or most))
    slots = tables.long()[:, at // page] * page + at % page
    key, value = (stored[slots].double().where(seen[..., None, None], 0.0) for stored in (keys, values))
    key, value = (one.repeat_interleave(group, 2) for one in (key, value))
    scores = torch.einsum("ahw,athw->aht", query.double(), key) * scale
    shares = scores.where(seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("aht,athv->ahv", shares, value).to(query.dtype)
