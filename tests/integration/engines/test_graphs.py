"""Batches of frequent shapes are replayed with the same outputs; a backend that captures on the CPU stands for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from headrace.device import streams
from headrace.device.cuda_graphs import CudaGraph, MemoryRead
from headrace.device.graph_runner import GraphRunner
from headrace.device.graphs import BatchShape, ShapeBook
from headrace.engines.choosing.registry import create
from headrace.engines.networks import pytorch
from headrace.errors import ConfigError

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
    raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


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
    assert book.state(BatchShape(4, 16)) == "refused"


def test_after_a_failed_capture_no_other_shape_is_tried_and_the_reason_is_kept(engine: Any) -> None:
    tried: list[int] = []

    def capture(call: Call, tensors: Mapping[str, torch.Tensor]) -> Captured:
        tried.append(len(tensors["input_ids"]))
        return refused(call, tensors)

    graphs = engine.network.graphs = runner(engine, capture, Paying(1e9))
    for batch in [*batches(engine), *([one[0]] for one in batches(engine))]:
        engine.forward(batch)
    assert tried == [4]
    assert graphs.failure == engine.network.meter.no_graphs.removeprefix("off: ") != ""
    assert "\n" not in graphs.failure


def test_a_graph_keeps_the_memory_that_it_reads_and_nothing_that_it_makes(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers asks
    network = engine.network
    network.graphs = None
    ready = [one.payload for one in engine.prepare(["the mill", "a wheel"])]
    arrays = engine.tokens.collate(engine.tokens.rows_of(ready), network.inputs)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.inference_mode(), MemoryRead() as read:
        network.call(tensors)
    addresses = {one.untyped_storage().data_ptr() for one in (*network.module.parameters(), *tensors.values())}
    weights = sum(one.untyped_storage().nbytes() for one in network.module.parameters())
    assert len(addresses & read.kept.keys()) > 20
    assert sum(storage.nbytes() for storage in read.kept.values()) < 1.01 * weights

    table = torch.arange(6.0)
    with MemoryRead() as read:
        (table * 2 + 1)[torch.tensor([2, 3])].add_(1)
    address = table.data_ptr()
    del table
    assert read.kept[address].nbytes() == 24


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.nonzero(),
        lambda one: one.sum().item(),
        lambda one: one[one > 2],
        lambda one: one.unique(),
        lambda one: one.to("meta"),
        lambda one: torch.where(one > 2),
    ],
)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_a_call_that_waits_for_the_device_is_stopped_before_cuda_would_fail(call: Any, mode: Any) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"), mode(), MemoryRead():
        call(torch.arange(6.0))


def test_enforce_eager_does_without_graphs_and_is_told(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "cuda_graphs", lambda *_: runner(engine, Captured, Paying(1e9)))
    network = engine.network
    network.allow_graphs(enforce_eager=False)
    assert network.graphs is None, "a CPU has none"
    monkeypatch.setattr(network, "kind", "cuda")
    network.allow_graphs(enforce_eager=False)
    assert network.graphs is not None
    network.allow_graphs(enforce_eager=True)
    assert network.graphs is None
    assert "enforce_eager" in network.meter.no_graphs
    with pytest.raises(ConfigError, match="must be True or False"):
        create("embed", device="cpu", enforce_eager="no")


def test_a_capture_is_not_disturbed_by_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the same streams, of which PyTorch has few, and wait for the device only when nothing is captured."""
    made: list[object] = []
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(streams.CAPTURING.locked()))
    device = torch.device("cuda:7")
    pipelines = [streams.pipeline_on(device, torch.float32) for _ in range(9)]
    assert made == [device] * 3
    pipelines[0]._streams.settle()
    assert waited == [True]
    streams.side_streams.cache_clear()


def test_memory_of_a_call_that_fails_is_not_used_before_the_device_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The inputs are made on the stream of computing and read on that of capture: the first waits for the second."""
    main, side = Mock(), Mock()
    monkeypatch.setattr("headrace.device.cuda_graphs.side_streams", lambda device: Mock(capture=side))
    within = {name: lambda _: contextlib.nullcontext() for name in ("device", "stream")}
    monkeypatch.setattr(torch, "cuda", Mock(current_stream=lambda device: main, **within))
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaGraph((0, 0), Mock(side_effect=RuntimeError("out of memory")), {"ids": torch.zeros(2)})
    main.wait_stream.assert_called_once_with(side)
