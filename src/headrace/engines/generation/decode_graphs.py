"""CUDA graphs of the steps in which each answer gets one more token: the host launches one graph, not each kernel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from headrace.device.cuda_graphs import CudaGraph
from headrace.device.pipeline import Arrays
from headrace.device.streams import to_device
from headrace.device_errors import is_out_of_memory
from headrace.engines.generation.paged_attention import (
    PAGE,
    AttentionCall,
    PagedModel,
    StepPart,
    decode,
    forward,
    store,
)
from headrace.errors import first_line

logger = logging.getLogger("headrace")

_LEAST_PAGES = 32
"""Pages of the longest answer for which the first graphs are captured; others follow at each doubling."""


class DecodeGraphs:
    """Runs steps of a paged model as graphs: one for each of a few numbers of answers, captured when first needed.

    Args:
        paged: the model with its cache.
    """

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], CudaGraph] = {}
        self.failure = ""
        """Why steps are not replayed; empty while they are."""

    def run(self, parts: Sequence[StepPart]) -> torch.Tensor | None:
        """The logits after each part, of shape (parts, vocabulary); None for a step that is not replayed."""
        if self.failure or not all(len(part.ids) == 1 and part.chooses for part in parts):
            return None
        answers = rounded(len(parts))
        width = max(_LEAST_PAGES, 1 << (max(len(part.pages) for part in parts) - 1).bit_length())
        inputs = self._inputs(parts, answers, width)
        if (answers, width) not in self._graphs:
            try:
                self._graphs[answers, width] = CudaGraph(self._pool, partial(_forward, self._paged), inputs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self.failure = first_line(error)
                logger.info("steps cannot be captured as CUDA graphs and run one by one: %s", self.failure)
                return None
        return self._graphs[answers, width](inputs)[: len(parts)]

    def _inputs(self, parts: Sequence[StepPart], answers: int, width: int) -> Mapping[str, torch.Tensor]:
        """A step filled up to `answers` with answers of one token, on the page that belongs to none."""
        spare = self._paged.spare_page
        tables = np.full((answers, width), spare, np.int32)
        lengths = np.ones(answers, np.int32)
        numbers = np.zeros((3, answers), np.int64)
        numbers[2] = spare * PAGE
        for place, part in enumerate(parts):
            tables[place, : len(part.pages)] = part.pages
            lengths[place] = part.known + 1
            numbers[:, place] = part.ids[0], part.known, part.pages[part.known // PAGE] * PAGE + part.known % PAGE
        arrays: Arrays = {"tables": tables, "lengths": lengths, "numbers": numbers, "last": np.arange(answers)}
        return {name: to_device(array, self._paged.device) for name, array in arrays.items()}


def rounded(answers: int) -> int:
    """The number of answers that a step of this many is filled up to: a power of two, or one and a half times one."""
    power = 1 << (answers - 1).bit_length()
    return power * 3 // 4 if power > 4 and answers <= power * 3 // 4 else power


def _forward(paged: PagedModel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    ids, positions, slots = tensors["numbers"]
    tables, lengths, layers = tensors["tables"], tensors["lengths"], iter(paged.layers)

    def attend(call: AttentionCall) -> torch.Tensor:
        if not call.is_plain:
            raise RuntimeError("its attention has a cap or sinks")  # no kernel computes it
        stored = next(layers)
        store(call, stored, slots)
        return decode(call, stored, len(lengths), tables, lengths)[None]

    return forward(paged.model, ids, positions, tensors["last"], attend)
