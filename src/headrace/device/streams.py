"""PyTorch devices as the pipeline sees them: CUDA with a stream for each direction of copying, or the CPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.device.pipeline import Arrays, Computed, NetworkCall, OutputRows, Pipeline

logger = logging.getLogger("headrace")

CAPTURING = threading.Lock()
"""Held while a graph is captured. Waiting for the device meanwhile would fail, and would end the capture."""


@dataclass(frozen=True, slots=True)
class SideStreams:
    """The streams of a device beside the default one, on which models compute."""

    copy_in: torch.cuda.Stream
    copy_out: torch.cuda.Stream
    capture: torch.cuda.Stream


@functools.cache
def side_streams(device: torch.device) -> SideStreams:
    """The same for all models. PyTorch gives out 32 streams in turn: a model that takes new ones may get the stream on
    which another model captures, and its copies would become a part of that graph."""
    return SideStreams(*(torch.cuda.Stream(device) for _ in range(3)))


def synchronize(device: torch.device) -> None:
    with CAPTURING:
        torch.cuda.synchronize(device)


def pipeline_on(device: torch.device, dtype: torch.dtype) -> Pipeline:
    """The pipeline of a device, for a model whose floating-point inputs have this dtype."""
    return Pipeline(_CudaStreams(device, dtype) if device.type == "cuda" else _CpuStreams(dtype))


def to_device(host: NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers on the device. Nothing waits for the copy but what is queued later on the current stream."""
    tensor = host if isinstance(host, torch.Tensor) else torch.from_numpy(host)
    if device.type == "cuda":
        tensor = page_locked(tensor).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def page_locked(like: torch.Tensor) -> torch.Tensor:
    """Host memory for a copy; other memory where the system locks no more pages, which only makes the copy slower."""
    try:
        return torch.empty_like(like, device="cpu", pin_memory=True)
    except RuntimeError as error:
        logger.debug("no page-locked memory: %s", error)
        return torch.empty_like(like, device="cpu")


class _CpuStreams:
    """A CPU: all work is done at once, on memory where it is."""

    overlaps = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def copy_in(self, arrays: Arrays) -> _CpuBatch:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return _CpuBatch({name: _cast(tensor, self._dtype) for name, tensor in tensors.items()})

    def settle(self) -> None:
        """Nothing is queued."""


class _CpuBatch:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def compute(self, call: NetworkCall) -> None:
        started = time.perf_counter()
        self._output = call(self._tensors)
        self._seconds = time.perf_counter() - started

    def copy_out(self) -> None:
        pass

    def wait(self) -> Computed:
        return Computed(_for_numpy(self._output).numpy(), self._seconds)


class _CudaStreams:
    """A CUDA device. Models compute on its default stream."""

    overlaps = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._side = side_streams(device)

    def copy_in(self, arrays: Arrays) -> _CudaBatch:
        with torch.cuda.stream(self._side.copy_in):
            tensors = {name: _cast(to_device(array, self._device), self._dtype) for name, array in arrays.items()}
            return _CudaBatch(tensors, self._side.copy_in.record_event(), self._side.copy_out)

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # the device failed: there is nothing to wait for
            synchronize(self._device)


class _CudaBatch:
    """PyTorch pools page-locked memory, and does not use it again before the copies that it is in have ended."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], copied: torch.cuda.Event, out: torch.cuda.Stream) -> None:
        self._tensors = tensors
        self._copied = copied
        self._out = out
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def compute(self, call: NetworkCall) -> None:
        stream = torch.cuda.current_stream(self._out.device)
        stream.wait_event(self._copied)
        self._started.record(stream)
        self._output = _for_numpy(call(self._tensors))
        self._ended.record(stream)

    def copy_out(self) -> None:
        self._out.wait_event(self._ended)
        with torch.cuda.stream(self._out):
            rows = page_locked(self._output)
            self._rows = rows.copy_(self._output, non_blocking=True)
            # Blocking: the thread that waits sleeps, and leaves its core to those that prepare records.
            self._done = torch.cuda.Event(blocking=True)
            self._done.record(self._out)

    def wait(self) -> Computed:
        self._done.synchronize()
        rows: OutputRows = self._rows.numpy().copy()  # frees the page-locked memory for the next batch
        return Computed(rows, self._started.elapsed_time(self._ended) / 1000)


def _for_numpy(output: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits as float32; others as they are."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
