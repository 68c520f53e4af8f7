"""Moves the weights of a model to host memory and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from itertools import chain

import torch

from headrace.device.placement import release
from headrace.device.streams import synchronize

logger = logging.getLogger("headrace")

_ALIGNED = 64
"""Bytes: each tensor begins at a multiple."""


class HostBlock:
    """Host memory of one size, page-locked where the system allows it, and given back when it is dropped.

    PyTorch's own page-locked memory would be rounded up to a power of two for each tensor, and never given back.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._taken = 0
        if device.type == "cuda" and size:
            address = self._memory.data_ptr()
            if (code := int(torch.cuda.cudart().cudaHostRegister(address, size, 0))) == 0:
                weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)
            else:
                logger.debug("no page-locked memory for %d bytes: CUDA error %d", size, code)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this memory, queued on the current stream."""
        size, start = _span(tensor), self._taken
        self._taken += -(-size // _ALIGNED) * _ALIGNED
        flat = self._memory[start : start + size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, _strides(tensor)).copy_(tensor, non_blocking=True)


_asleep: weakref.WeakKeyDictionary[torch.nn.Module, HostBlock] = weakref.WeakKeyDictionary()
"""Where the weights of models are that sleep."""


def to_host(module: torch.nn.Module, device: torch.device) -> None:
    """Move all weights to host memory, page-locked where the system allows it, and free those on the device."""
    sizes = [-(-_span(tensors[0]) // _ALIGNED) * _ALIGNED for tensors in _sharing(module)]
    block = HostBlock(sum(sizes), device)
    _replace(module, block.copy, device)
    _asleep[module] = block
    release(device)


def to_device(module: torch.nn.Module, device: torch.device) -> None:
    """Undo `to_host`, and give the host memory back.

    Raises:
        torch.OutOfMemoryError: the device has no room. Some weights are then on the device.
    """
    _replace(module, lambda tensor: tensor.to(device, non_blocking=True, copy=True), device)
    _asleep.pop(module, None)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides, or those of a contiguous copy if some of its elements share memory."""
    own: tuple[int, ...] = tensor.stride()
    return own if 0 not in own else tuple(torch.empty(tensor.shape, device="meta").stride())


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, _strides(tensor), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in pairs)
    return int(elements * tensor.element_size())


def _sharing(module: torch.nn.Module) -> list[list[torch.Tensor]]:
    """The parameters and buffers, those that share data together."""
    sharing: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for tensor in {id(one): one for one in chain(module.parameters(), module.buffers())}.values():
        key = (tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
        sharing.setdefault(key, []).append(tensor)
    return list(sharing.values())


def _replace(module: torch.nn.Module, copy: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Give each parameter and buffer a copy of its data. Those that share data share the copy."""
    for tensors in _sharing(module):
        copied = copy(tensors[0].detach())
        for tensor in tensors:
            tensor.data = copied
    if device.type == "cuda":
        synchronize(device)
