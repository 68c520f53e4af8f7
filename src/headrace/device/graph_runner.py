"""Runs batches of frequent small shapes as CUDA graphs, where that gives the same outputs and is faster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch

from headrace.device.graphs import Shape, ShapeBook
from headrace.device.pipeline import Computed, Pipeline
from headrace.device.streams import Arrays, Call, Rows

logger = logging.getLogger("headrace")

_SHARE = 0.05
"""Of a device's memory, that graphs may take."""


class Graph(Protocol):
    """A captured call of a model."""

    bytes: int
    """Memory that it keeps."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output for inputs of the captured shape."""
        ...


Capture: TypeAlias = Callable[[Call, Mapping[str, torch.Tensor]], Graph]
"""Captures a call for inputs of these shapes."""


class GraphRunner:
    """Takes batches through a pipeline. Used by several threads.

    Args:
        pipeline: of the device.
        capture: makes a graph.
        tolerance: how much outputs may differ by rounding, as a fraction of the largest.
        book: decides.
    """

    def __init__(
        self, pipeline: Pipeline[Arrays, Call, Rows], capture: Capture, tolerance: float, book: ShapeBook
    ) -> None:
        self._pipeline = pipeline
        self._capture = capture
        self._tolerance = tolerance
        self._book = book
        self._graphs: dict[Shape, Graph] = {}
        self._lock = threading.Lock()

    def length_for(self, texts: int, longest: int) -> int:
        """The length to pad a batch to: that of a captured shape, or of one that is to be captured."""
        with self._lock:
            shape = self._book.shape(texts, longest)
            return shape.length if shape and self._book.state(shape) in ("wanted", "captured") else longest

    def run(self, arrays: Arrays, call: Call, padded_call: Call) -> Computed[Rows]:
        """The rows of a batch of texts. `padded_call` asks the host for nothing that depends on the batch."""
        texts, length = arrays["attention_mask"].shape
        with self._lock:
            shape = self._book.shape(texts, length)
            graph = self._graphs.get(shape) if shape and shape.length == length else None
        if shape is None:
            return self._pipeline.run(arrays, call)
        if graph is not None:
            return self._replay(shape, graph, arrays)
        computed = self._pipeline.run(arrays, call)
        with self._lock:
            self._book.ran(shape, computed.seconds)
            captures = self._book.state(shape) == "wanted" and shape.length == length
            if captures:  # another thread must not begin as well
                self._book.refuse(shape)
        if captures:
            self._try(shape, arrays, padded_call, computed.rows)
        return computed

    def _replay(self, shape: Shape, graph: Graph, arrays: Arrays) -> Computed[Rows]:
        computed = self._pipeline.run(_filled(arrays, shape.texts), graph)
        with self._lock:
            self._book.replayed(shape, computed.seconds)
            if self._book.state(shape) == "refused":
                self._graphs.pop(shape, None)
        return Computed(computed.rows[: len(arrays["attention_mask"])], computed.seconds, replayed=True)

    def _try(self, shape: Shape, arrays: Arrays, call: Call, expected: Rows) -> None:
        """Capture a shape, and keep it if it gives the rows that are expected."""
        made: list[Graph] = []

        def capturing(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            made.append(self._capture(call, tensors))
            return made[0](tensors)

        try:
            rows = self._pipeline.run(_filled(arrays, shape.texts), capturing).rows[: len(expected)]
        except Exception as error:  # noqa: BLE001  # a model's code may raise anything; the batch itself has run
            logger.debug("%s cannot be captured: %s", shape, error)
            return
        room = self._tolerance * float(np.abs(expected).max())
        if rows.shape == expected.shape and float(np.abs(rows - expected).max()) <= room:  # never with NaN
            with self._lock:
                self._book.captured(shape, made[0].bytes)
                self._graphs[shape] = made[0]


def _filled(arrays: Arrays, texts: int) -> Arrays:
    """The batch with so many texts: copies of its first one at the end."""
    missing = texts - len(arrays["attention_mask"])
    if not missing:
        return arrays
    return {name: np.concatenate([array, np.repeat(array[:1], missing, axis=0)]) for name, array in arrays.items()}


class _CudaGraph:
    def __init__(self, pool: tuple[int, int], call: Call, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        device = next(iter(tensors.values())).device
        main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):  # libraries choose kernels and take workspaces at the first calls
            for _ in range(2):
                call(self._inputs)
        main.wait_stream(side)
        before = torch.cuda.memory_reserved(device)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another one may copy its batch meanwhile.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            self._output = call(self._inputs)
        self.bytes = max(torch.cuda.memory_reserved(device) - before, 0)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._output.clone()  # the next replay overwrites it


def cuda_graphs(pipeline: Pipeline[Arrays, Call, Rows], device: torch.device, tolerance: float) -> GraphRunner:
    """A runner for a CUDA device. The graphs share memory, since only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    most = _SHARE * torch.cuda.get_device_properties(device).total_memory
    return GraphRunner(pipeline, lambda call, tensors: _CudaGraph(pool, call, tensors), tolerance, ShapeBook(most))
