"""Steps that are replayed on a GPU, by a double that repeats the operations of a call on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fake_cuda import RecordedGraph
from tests.kernels import by_pytorch

from headrace.engines.choosing.registry import create
from headrace.engines.generation import continuous, decode_graphs
from headrace.engines.generation.decode_graphs import DecodeGraphs, rounded
from headrace.engines.generation.paged_attention import PagedModel, StepPart


class CountedGraph(RecordedGraph):
    made = 0

    def __init__(self, *given: Any) -> None:
        CountedGraph.made += 1
        super().__init__(*given)


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    CountedGraph.made = 0
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    monkeypatch.setattr(decode_graphs, "CudaGraph", CountedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def paged_models() -> tuple[PagedModel, PagedModel]:
    engine = create("generate", device="cpu", dtype="float32")
    model, shapes = engine._lm.model, engine._shapes.shapes
    return PagedModel(model, shapes, 40), PagedModel(model, shapes, 40, gathers=True, kernels=True)


PROMPTS = [StepPart([5] * 5, 0, [3], True), StepPart([6] * 40, 0, [5, 9], True), StepPart([7] * 70, 0, [1, 0, 2], True)]
NEXT = [StepPart([7], 5, [3], True), StepPart([8], 40, [5, 9], True), StepPart([9], 70, [1, 0, 2], True)]


def test_a_replayed_step_gives_the_scores_of_each_answer_alone() -> None:
    alone, paged = paged_models()
    graphs = DecodeGraphs(paged)
    assert graphs.run(PROMPTS) is None, "prompts are not replayed"
    torch.testing.assert_close(paged.run(PROMPTS), alone.run(PROMPTS), rtol=1e-4, atol=1e-4)
    for step in (NEXT, [StepPart([4], part.known + 1, part.pages, True) for part in NEXT[:2]]):
        torch.testing.assert_close(graphs.run(step), alone.run(step), rtol=1e-4, atol=1e-4)
    assert CountedGraph.made == 2, "one for four answers, one for two"
    mixed = [StepPart([4], part.known + 2, part.pages, True) for part in NEXT[:2]]
    mixed.append(StepPart([5] * 33, 0, [11, 12], True))
    assert graphs.run(mixed) is None
    torch.testing.assert_close(paged.run(mixed), alone.run(mixed), rtol=1e-4, atol=1e-4)


FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda one: one.sum().item(),
    "a list": lambda one: one.tolist(),
    "an array": lambda one: one.numpy(),
    "nonzero": lambda one: one.nonzero(),
    "an index of booleans": lambda one: one[one > 0],
    "a copy to another device": lambda one: one.to("meta"),
    "page-locked memory": lambda one: torch.empty(8, pin_memory=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_does_what_a_capture_refuses_runs_as_before(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = decode_graphs.decode

    def faulty(call: Any, stored: Any, *others: Any) -> torch.Tensor:
        FAULTS[fault](call.query)
        return own(call, stored, *others)

    monkeypatch.setattr(decode_graphs, "decode", faulty)
    graphs = DecodeGraphs(paged_models()[1])
    assert graphs.run(NEXT) is None
    assert "waits for the device" in graphs.failure or "when stream is capturing" in graphs.failure


def test_what_the_host_has_counted_at_the_capture_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double replays operations, not Python: lengths that the host gave to the first step are wrong later."""
    alone, paged = paged_models()
    paged.run(PROMPTS)
    alone.run(PROMPTS)
    own, first = decode_graphs.decode, torch.tensor([6, 41, 71, 1], dtype=torch.int32)

    def of_the_first_step(call: Any, stored: Any, count: int, tables: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return own(call, stored, count, tables, first)

    monkeypatch.setattr(decode_graphs, "decode", of_the_first_step)
    graphs = DecodeGraphs(paged)
    torch.testing.assert_close(graphs.run(NEXT), alone.run(NEXT), rtol=1e-4, atol=1e-4)
    later = [StepPart([4], part.known + 1, part.pages, True) for part in NEXT]
    assert not torch.allclose(graphs.run(later), alone.run(later), rtol=1e-4, atol=1e-4)


def test_a_step_that_cannot_be_captured_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> CountedGraph:
        raise RuntimeError("the model waits for the device\nhere")

    monkeypatch.setattr(decode_graphs, "CudaGraph", refused)
    graphs = DecodeGraphs(paged_models()[1])
    assert graphs.run(NEXT) is None
    assert graphs.failure == "the model waits for the device"


def test_out_of_memory_at_a_capture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> CountedGraph:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decode_graphs, "CudaGraph", refused)
    with pytest.raises(torch.OutOfMemoryError):
        DecodeGraphs(paged_models()[1]).run(NEXT)


def test_few_numbers_of_answers_are_captured() -> None:
    sizes = [rounded(answers) for answers in range(1, 513)]
    assert sorted(set(sizes)) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(answers <= size <= max(1.5 * answers, 4) for answers, size in enumerate(sizes, 1))


@pytest.mark.parametrize("fault", ["", "raises", "is wrong"])
def test_an_engine_answers_with_kernels_or_without(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("a kernel cannot be made")
        return torch.ones(*query.shape[:2], values.shape[-1])

    if fault:
        monkeypatch.setattr(by_pytorch, "paged_decode", broken)
    plain = create("generate", device="cpu", dtype="float32")
    monkeypatch.setattr(continuous, "has_kernels", lambda device: True)
    monkeypatch.setattr(
        continuous, "open_cache", lambda lm, shapes, size, kernels: PagedModel(
            lm.model, shapes, size.pages, gathers=kernels, kernels=kernels
        )
    )  # fmt: skip
    engine = create("generate", device="cpu", dtype="float32")
    assert (engine._graphs is None) == bool(fault)
    assert ("without Headrace's own kernels" in caplog.text) == bool(fault)
    texts = []
    for one in (plain, engine):
        for key, ask in enumerate(one.prepare(["1+2=", "10+20=", "3+4="])):
            one.add(key, ask.payload)
        found: dict[int, Any] = {}
        while len(found) < 3:
            found.update(one.step())
        texts.append([found[key]["text"] for key in range(3)])
    assert texts[0] == texts[1]
    assert bool(CountedGraph.made) == (fault != "raises")
