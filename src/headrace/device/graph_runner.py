"""Runs batches of frequent small shapes as CUDA graphs, where that gives the same outputs and is faster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch

from headrace.device.graphs import BatchShape, ShapeBook
from headrace.device.pipeline import Arrays, Computed, NetworkCall, OutputRows, Pipeline
from headrace.errors import HeadraceError, first_line, model_code

logger = logging.getLogger("headrace")


class Graph(Protocol):
    """A captured call of a model."""

    bytes: int
    """Memory that it keeps."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


Capture: TypeAlias = Callable[[NetworkCall, Mapping[str, torch.Tensor]], Graph]
"""Captures a call for inputs of these shapes."""


class GraphRunner:
    """Takes batches through a pipeline. Used by several threads.

    Args:
        tolerance: how much outputs may differ by rounding, as a fraction of the largest.
    """

    def __init__(self, pipeline: Pipeline, capture: Capture, tolerance: float, book: ShapeBook) -> None:
        self._pipeline = pipeline
        self._capture = capture
        self._tolerance = tolerance
        self._book = book
        self._graphs: dict[BatchShape, Graph] = {}
        self._lock = threading.Lock()
        self.failure = ""
        """Why nothing is captured any more; empty while shapes are."""

    def run(
        self,
        texts: int,
        longest: int,
        direct: Callable[[], Computed],
        padded: Callable[[int], Arrays],
        call: NetworkCall,
    ) -> Computed:
        """The rows of a batch of texts.

        Args:
            texts: how many.
            longest: tokens of the longest.
            direct: runs the batch as it is.
            padded: the batch padded to a length, or as far as the model allows.
            call: takes a padded batch, and asks the host for nothing that depends on it.
        """
        with self._lock:
            shape = self._book.shape(texts, longest)
            graph = self._graphs.get(shape) if shape else None
        if shape is None:
            return direct()
        if graph is not None:
            return self._replay(shape, graph, padded(shape.length))
        computed = direct()
        with self._lock:
            self._book.ran(shape, computed.seconds)
            captures = self._book.state(shape) == "wanted" and not self.failure
            if captures:  # another thread must not begin as well
                self._book.refuse(shape)
        if captures:
            self._try(shape, padded(shape.length), call, computed.rows)
        return computed

    def _replay(self, shape: BatchShape, graph: Graph, arrays: Arrays) -> Computed:
        computed = self._pipeline.run(_filled(arrays, shape.texts), graph)
        with self._lock:
            self._book.replayed(shape, computed.seconds)
            if self._book.state(shape) == "refused":
                self._graphs.pop(shape, None)
        return Computed(computed.rows[: len(arrays["attention_mask"])], computed.seconds, replayed=True)

    def _try(self, shape: BatchShape, arrays: Arrays, call: NetworkCall, expected: OutputRows) -> None:
        """Capture a shape, and keep it if it gives the rows that are expected."""
        made: list[Graph] = []

        def capturing(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            made.append(self._capture(call, tensors))
            return made[0](tensors)

        try:
            with model_code():
                rows = self._pipeline.run(_filled(arrays, shape.texts), capturing).rows[: len(expected)]
        except HeadraceError as error:  # the batch itself has run
            # Another shape would fail as well, and each failure may cost memory.
            self.failure = first_line(error)
            logger.info("batches cannot be captured as CUDA graphs and run one by one: %s", self.failure)
            return
        room = self._tolerance * float(np.abs(expected).max())
        if rows.shape == expected.shape and float(np.abs(rows - expected).max()) <= room:  # never with NaN
            with self._lock:
                self._book.captured(shape, made[0].bytes)
                self._graphs[shape] = made[0]


def _filled(arrays: Arrays, texts: int) -> Arrays:
    """The batch filled up to `texts` texts with copies of its first one."""
    missing = texts - len(arrays["attention_mask"])
    if not missing:
        return arrays
    return {name: np.concatenate([array, np.repeat(array[:1], missing, axis=0)]) for name, array in arrays.items()}
