"""Moves the weights of a model to host memory and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch

from headrace.device.placement import release
from headrace.device.streams import page_locked, synchronize


def to_host(module: torch.nn.Module, device: torch.device) -> None:
    """Move all weights to host memory, page-locked where the system allows it, and free those on the device."""
    _replace(module, lambda tensor: page_locked(tensor).copy_(tensor, non_blocking=True), device)
    release(device)


def to_device(module: torch.nn.Module, device: torch.device) -> None:
    """Undo `to_host`.

    Raises:
        torch.OutOfMemoryError: the device has no room. Some weights are then on the device.
    """
    _replace(module, lambda tensor: tensor.to(device, non_blocking=True, copy=True), device)


def _replace(module: torch.nn.Module, copy: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Give each parameter and buffer a copy of its data. Those that share data share the copy."""
    sharing: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for tensor in {id(one): one for one in chain(module.parameters(), module.buffers())}.values():
        key = (tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
        sharing.setdefault(key, []).append(tensor)
    for tensors in sharing.values():
        copied = copy(tensors[0].detach())
        for tensor in tensors:
            tensor.data = copied
    if device.type == "cuda":
        synchronize(device)
