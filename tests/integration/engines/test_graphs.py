"""Batches of frequent shapes are replayed with the same outputs; a backend that captures on the CPU stands for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from headrace.device.graph_runner import GraphRunner
from headrace.device.graphs import Shape, ShapeBook
from headrace.engines.choosing.registry import create

WORDS = ["canal", "mill", "wheel", "water", "gate", "dry"]
Call = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class Captured:
    """Only takes inputs of the captured shape, in memory of its own, as a CUDA graph does."""

    bytes = 1_000

    def __init__(self, call: Call, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        self._call = call

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, tensor in tensors.items():
            assert tensor.shape == self._inputs[name].shape
            self._inputs[name].copy_(tensor)
        return self._call(self._inputs).clone()


class Wrong(Captured):
    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().__call__(tensors).flip(0)


def refused(call: Call, tensors: Mapping[str, torch.Tensor]) -> Captured:
    raise RuntimeError("operation not permitted when stream is capturing")


class Paying(ShapeBook):
    """On a CPU nothing is gained."""

    def _pays(self, record: object) -> bool:
        return True


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    engine = create("embed", device="cpu", dtype="float32")
    yield engine
    engine.close()


def batches(engine: Any, count: int = 26) -> list[list[Any]]:
    """Batches of 3 and 4 texts of up to 16 tokens."""
    found = []
    for number in range(count):
        words = [" ".join(WORDS[(number + n) % 6 :] * (1 + (number + n) % 2)) for n in range(3 + number % 2)]
        found.append([one.payload for one in engine.prepare(words)])
    return found


def runner(engine: Any, capture: Any, book: ShapeBook) -> GraphRunner:
    return GraphRunner(engine.network._pipeline, capture, engine.network.tolerance, book)


def test_replays_give_the_same_vectors(engine: Any) -> None:
    every = batches(engine)
    engine.network.graphs = None
    expected = [np.stack(engine.forward(batch)) for batch in every]
    engine.network.graphs = runner(engine, Captured, Paying(1e9))
    before = engine.network.meter.read().replayed
    with ThreadPoolExecutor(2) as threads:
        found = [np.stack(rows) for rows in threads.map(engine.forward, every)]
    assert engine.network.meter.read().replayed >= before + 5
    for rows, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, others, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("capture", [Wrong, refused])
def test_a_shape_that_cannot_be_captured_or_gives_other_vectors_is_run_as_before(engine: Any, capture: Any) -> None:
    book = Paying(1e9)
    engine.network.graphs = runner(engine, capture, book)
    before = engine.network.meter.read().replayed
    for batch in batches(engine):
        assert len(engine.forward(batch)) == len(batch)
    assert engine.network.meter.read().replayed == before
    assert book.state(Shape(4, 16)) == "refused"
