"""CUDA graphs of a model's calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.device.graph_runner import GraphRunner
from headrace.device.graphs import ShapeBook
from headrace.device.pipeline import NetworkCall, Pipeline
from headrace.device.streams import CAPTURING, side_streams

_SHARE = 0.05
"""The share of a device's memory that graphs may take."""
_aten = torch.ops.aten
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
"""Operations that wait for the device only if an index is a mask."""
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class MemoryRead(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not read here
    """Keeps the memory that a call reads and has not made itself. A graph reads it again at the same address, when the
    model may have replaced it: some models make a larger table of positions for a longer text.

    Raises:
        RuntimeError: the call waits for the device. It is raised before CUDA would end the capture with an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.UntypedStorage] = {}
        """By address."""
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with self:  # in inference mode, an operation that consists of others comes whole, such as `to`
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        taken = _tensors((args, kwargs))
        target = (kwargs or {}).get("device")
        self._check(func, args, [one.device for one in taken] + ([target] if target else []))
        self.kept |= {at: storage for at, storage in _storages(taken).items() if at not in self._made}
        found = func(*args, **(kwargs or {}))
        self._made.update(_storages(_tensors(found)).keys() - self.kept.keys())
        return found

    def _check(self, func: torch._ops.OpOverload, args: tuple[object, ...], devices: list[torch.device]) -> None:
        if func in _INDEXING:
            waits = any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1]))
        elif func in _COPIES:
            waits = len({device.type for device in devices}) > 1
        else:
            waits = bool(_WAITING & set(func.tags))
        if waits:
            raise RuntimeError(f"the model waits for the device ({func})")


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storages(tensors: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Their memory by address, without that of quantised and packed weights, which the model never replaces."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


class CudaGraph:
    """A captured call.

    Args:
        pool: the memory that it shares with others, of which one runs at a time.
        call: is captured.
        tensors: inputs of the shape that is captured.

    Raises:
        RuntimeError: it cannot be captured.
    """

    def __init__(self, pool: tuple[int, int], call: NetworkCall, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        device = next(iter(tensors.values())).device
        main, side = torch.cuda.current_stream(device), side_streams(device).capture
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph leaves its stream the current one if the capture fails: the context of `main` undoes that.
        with CAPTURING, torch.cuda.device(device), torch.cuda.stream(main):
            side.wait_stream(main)
            try:
                with torch.cuda.stream(side):  # libraries choose kernels and take workspaces at the first calls
                    for _ in range(2):
                        call(self._inputs)
            finally:
                main.wait_stream(side)  # which uses the memory of the inputs: it is free again if a call fails
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # as torch.cuda.graph does, which would hide what the graph takes
            before = torch.cuda.memory_reserved(device)
            read = MemoryRead()
            # Of this thread alone: another one may copy its batch meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"), read:
                self._output = call(self._inputs)
            self.bytes = max(torch.cuda.memory_reserved(device) - before, 0)
        self._read = read.kept

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # All on the stream of computing: the next batch cannot change the inputs before this replay has read them.
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._output.clone()  # the next replay overwrites it


def cuda_graphs(pipeline: Pipeline, device: torch.device, tolerance: float) -> GraphRunner:
    """A runner for a CUDA device. The graphs share memory, since only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    most = _SHARE * torch.cuda.get_device_properties(device).total_memory
    return GraphRunner(pipeline, lambda call, tensors: CudaGraph(pool, call, tensors), tolerance, ShapeBook(most))
