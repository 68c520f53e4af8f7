"""A GPU without a driver: PyTorch's fake tensors run the branches for CUDA, compute nothing and know shapes.

What a host could only know by waiting for the device fails here: a number of a tensor, a shape that depends on its
numbers, and a copy between host and device, which belongs to the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.device.cuda_graphs import MemoryRead
from headrace.device.pipeline import Arrays, Computed, NetworkCall

_READS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"}
_READS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}


class DeviceWaitError(AssertionError):
    """The host would wait for the device."""


class FakeCuda:
    """A device. Its tensors cannot be mixed with those of another one."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within it, "cuda" is this device, and nothing may wait for it."""
        own = {name: getattr(FakeTensor, name) for name in _ASKING}
        for name, method in _ASKING.items():
            setattr(FakeTensor, name, method)
        try:
            with self._mode, _NoWaits(), torch.inference_mode():
                yield
        except RuntimeError as error:
            if "no NVIDIA driver" in str(error):
                pytest.skip("PyTorch's CUDA build asks for a driver, also with fake tensors")
            raise
        finally:
            for name, method in own.items():
                setattr(FakeTensor, name, method)

    def move(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """Put a module's weights on the device, in this type. Their numbers are lost."""
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                held.update({name: self.like(one, dtype) for name, one in held.items() if one is not None})

    def like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape on the device, of this type unless it holds integers."""
        with self._mode:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=kind, device="cuda")


class FakePipeline:
    """Takes the place of a network's pipeline: the batch is on the device when the model is called."""

    overlaps = True

    def __init__(self, device: FakeCuda, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.calls = 0

    def run(self, arrays: Arrays, call: NetworkCall) -> Computed:
        """Rows of ones, of the shape that the model would give."""
        tensors: Mapping[str, torch.Tensor] = {
            name: self._device.like(torch.from_numpy(array), self._dtype) for name, array in arrays.items()
        }
        with self._device.at_work():
            output = call(tensors)
        assert output.is_cuda
        self.calls += 1
        return Computed(np.ones(output.shape, np.float32), 0.0)


class RecordedGraph:
    """Takes the place of a CUDA graph, on the CPU: a replay repeats the operations that a call had, on the same memory.

    What the host computed, chose or read while the call was captured stays as it was. What CUDA refuses ends the
    capture.
    """

    bytes = 1_000

    def __init__(self, pool: object, call: NetworkCall, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        with pytest.MonkeyPatch.context() as patched, torch.inference_mode(), MemoryRead(), _Recorder(self._steps):
            for name in ("cpu", "numpy", "tolist"):  # on a CPU, they are no operations
                patched.setattr(torch.Tensor, name, _not_permitted)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers asks
            self._output = call(self._inputs)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert self._inputs.keys() == tensors.keys()
        with torch.inference_mode():
            for name, tensor in tensors.items():
                assert tensor.shape == self._inputs[name].shape, "a graph takes inputs of its own shape"
                self._inputs[name].copy_(tensor)
            for func, args, kwargs, made in self._steps:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return self._output.clone()


def _not_permitted(*_: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not read here
    """Notes operations, and refuses those that cannot be captured: page-locked memory is allocated by the driver."""

    def __init__(self, steps: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory") or "pin_memory" in func.overloadpacket.__name__:
            _not_permitted()
        made = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, made))
        return made


class _NoWaits(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not read here
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in _READS:
            raise DeviceWaitError(f"the host reads from the device: {name}")
        if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
            raise DeviceWaitError("a length depends on numbers of the device: repeat_interleave")
        places = args[1] if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)) else ()
        if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in places):
            raise DeviceWaitError("a length depends on numbers of the device: an index of booleans")
        output = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        if given and len({one.device.type for one in [*given, *made] if one.is_cuda or one.dim()}) > 1:
            raise DeviceWaitError(f"a copy between host and device: {name}")
        return output


# PyTorch asks for a driver in these methods where it is built without CUDA. Here they are single operations.


def _getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(one is Ellipsis for one in parts):
        at = next(place for place, one in enumerate(parts) if one is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - sum(one is not None for one in parts) + 1)
    dim, tensors = 0, list[torch.Tensor | None]()
    for one in parts:
        if isinstance(one, int):
            tensor = tensor.select(dim, one)
            continue
        if one is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(one, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, one.start, one.stop, one.step or 1)
        tensors.append(one if isinstance(one, torch.Tensor) else None)
        dim += 1
    return torch.ops.aten.index.Tensor(tensor, tensors) if any(one is not None for one in tensors) else tensor


def _setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
    if isinstance(index, torch.Tensor):
        torch.ops.aten.index_put_(tensor, [index], torch.as_tensor(value, device=tensor.device))
    elif isinstance(value, torch.Tensor):
        _getitem(tensor, index).copy_(value)
    else:
        _getitem(tensor, index).fill_(value)


def _refused(name: str) -> Any:
    def method(*_: object, **__: object) -> None:
        raise DeviceWaitError(f"the host reads from the device: {name}")

    return method


def _contiguous(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return tensor.clone(memory_format=memory_format)


_ASKING = {"__getitem__": _getitem, "__setitem__": _setitem, "contiguous": _contiguous}
_ASKING |= {name: _refused(name) for name in ("nonzero", "numpy")}
