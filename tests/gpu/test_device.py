"""What only a device can show: its memory, and that a job goes on when a batch was too large for it."""

from __future__ import annotations

import asyncio
import functools
import gc
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.contract.engines.fixtures import assert_same, payloads, together
from tests.small_models import text_model

import headrace
from headrace import DynamicBatcher
from headrace.device.memory import MemoryWatch
from headrace.device.streams import pipeline_on
from headrace.engines.capabilities import SLEEPING, memory_of
from headrace.engines.choosing import registry
from headrace.engines.networks import fusing, packing
from headrace.errors import EngineError, EngineOutOfMemoryError

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1_536}


@functools.cache
def encoder() -> Path:
    """all-MiniLM-L6-v2 with random weights: its package need not be there."""
    return text_model(Path(tempfile.mkdtemp()), head=False, initializer_range=0.02, **MINILM)


def create(task: str, **options: Any) -> Any:
    """An engine: for `embed` on that model."""
    return registry.create(task, *([encoder()] if task == "embed" else []), **options)


WORDS = "the canal feeds the mill wheel so that it never runs dry " * 12


def test_vectors_are_those_of_the_cpu(device: str) -> None:
    texts = ["a", WORDS, "the canal"]
    there, here = (
        engine.forward([one.payload for one in engine.prepare(texts)])
        for engine in (create("embed", device=device, dtype="float32"), create("embed", device="cpu"))
    )
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_vectors_made_without_padding_are_those_of_the_cpu(device: str, dtype: str) -> None:
    texts = ["a", WORDS, "the canal", "the mill", WORDS[:99]]
    there, here = create("embed", device=device, dtype=dtype), create("embed", device="cpu")
    assert there._rows.padding == "packed"
    one, other = (
        torch.as_tensor(np.stack(engine.forward([one.payload for one in engine.prepare(texts)])))
        for engine in (there, here)
    )
    assert float(torch.nn.functional.cosine_similarity(one, other).min()) > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_is_queued_without_a_wait_for_the_device(device: str, dtype: str) -> None:
    engine = create("embed", device=device, dtype=dtype)
    network = engine.network
    ready = [one.payload for one in engine.prepare(["a", WORDS, "the mill"])]
    texts = engine.tokens.rows_of(ready)
    expected = engine._rows(texts)  # the first batch loads kernels
    plan = packing.plan_of(texts.lengths, tiled=False, filled=False)
    arrays = {**engine.tokens.packed(texts, network.inputs, plan.length), packing.STARTS: plan.starts}
    call = packing.called_with(network.call, plan)
    pipeline = pipeline_on(torch.device(device), network.module.dtype)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a prototype
            torch.cuda.set_sync_debug_mode("error")
        with torch.inference_mode():
            batch = pipeline.begin(arrays, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    np.testing.assert_allclose(batch.wait().rows, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_layers_give_the_vectors_of_the_plain_ones(device: str, dtype: str) -> None:
    engine = create("embed", device=device, dtype=dtype)
    base = engine.network.module[0].model
    ready = many(engine)
    assert any(isinstance(part, fusing.FusedOutput) for part in base.modules()), "they gave other outputs, or failed"
    fused = np.stack(engine.forward(ready))
    fusing.unfuse(base)
    plain = np.stack(engine.forward(ready))
    assert np.abs(fused - plain).max() > 0
    assert (fused * plain).sum(1).min() > 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_give_the_answers_of_steps_without_graphs(device: str, dtype: str, tmp_path: Path) -> None:
    engine = create("generate", device=device, dtype=dtype)
    assert engine._graphs is not None and not engine._graphs.failure
    prompts = payloads(engine, [f"{number}+{number * 7}=" for number in range(20)])
    replayed = together(engine, prompts)
    assert len(engine._graphs._graphs) > 1, "nothing was captured"
    engine._graphs = None
    plain = together(engine, prompts)
    assert sum(one["text"] == other["text"] for one, other in zip(replayed, plain, strict=True)) >= 18


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 5, "seed": 1}], ids=["greedy", "sampled"])
def test_a_step_that_is_replayed_waits_for_the_device_once(device: str, sampling: dict[str, Any]) -> None:
    engine = create("generate", device=device, dtype="bfloat16")
    asked = {"ignore_eos": True, "max_tokens": 8, **sampling}
    for key, ask in enumerate(payloads(engine, [{"prompt": f"{number}+{number}=", **asked} for number in range(4)])):
        engine.add(key, ask)
    for _ in range(3):  # the prompts, and what is captured
        engine.step()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in warned if "called a synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 1, waits


def test_two_batches_on_the_device_do_not_mix(device: str) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = engine.prepare([f"{number} {WORDS[: number % 90]}" for number in range(2_000)])
    one, two = (
        np.stack(outputs(engine.forward, [item.payload for item in ready], overlap=overlap, size=64))
        for overlap in (False, True)
    )
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


def test_small_batches_are_replayed_with_the_same_vectors(device: str) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = [one.payload for one in engine.prepare([f"{number} {WORDS[: number % 60]}" for number in range(1_600)])]
    batches = [ready[start : start + 8] for start in range(0, len(ready), 8)]
    graphs, engine.network.graphs = engine.network.graphs, None
    expected = [np.stack(engine.forward(batch)) for batch in batches]
    engine.network.graphs = graphs
    for batch, rows in zip(batches, expected, strict=True):
        np.testing.assert_allclose(np.stack(engine.forward(batch)), rows, rtol=1e-3, atol=1e-4)
    assert engine.network.meter.read().replayed >= 5, "nothing could be captured"


def many(engine: Any, count: int = 1_600) -> list[Any]:
    """Short texts of some lengths."""
    return [one.payload for one in engine.prepare([f"{number} {WORDS[: number % 60]}" for number in range(count)])]


def test_replays_with_two_batches_in_flight_do_not_mix(device: str) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = many(engine, 4_000)
    replayed = np.stack(outputs(engine.forward, ready, overlap=True, size=8))
    assert engine.network.meter.read().replayed > 50, engine.network.meter.no_graphs
    engine.network.graphs = None
    np.testing.assert_allclose(replayed, np.stack(outputs(engine.forward, ready, overlap=False, size=8)), atol=1e-4)


def test_two_models_are_captured_at_the_same_time(device: str) -> None:
    engines = [create("embed", device=device, dtype="float32") for _ in range(2)]
    ready = many(engines[0])
    batches = [ready[start : start + 8] for start in range(0, len(ready), 8)]
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda engine: np.concatenate([np.stack(engine.forward(b)) for b in batches]), engines)
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
    assert [engine.network.meter.no_graphs for engine in engines] == ["", ""]
    assert all(engine.network.meter.read().replayed for engine in engines)


def test_a_graph_reads_what_was_there_when_the_model_replaces_its_tables(device: str) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = many(engine, 8)
    expected = np.stack(engine.forward(ready))
    for _ in range(30):
        engine.forward(ready)
    before = engine.network.meter.read().replayed
    assert before >= 5, engine.network.meter.no_graphs
    for one in engine.network.module.parameters():
        one.data = one.data.clone()
    filled = [torch.full((1 << 20,), 7.0, device=device) for _ in range(64)]  # takes what was freed
    np.testing.assert_allclose(np.stack(engine.forward(ready)), expected, rtol=1e-3, atol=1e-4)
    assert engine.network.meter.read().replayed > before
    del filled


def test_a_model_that_cannot_be_captured_runs_as_before(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready, call = many(engine, 8), engine.network.call
    expected = np.stack(engine.forward(ready))

    def waiting(tensors: Any) -> torch.Tensor:
        found = cast("torch.Tensor", call(tensors))
        return found + (found.sum() * 0).item()

    monkeypatch.setattr(engine.network, "call", waiting)
    for _ in range(30):
        np.testing.assert_allclose(np.stack(engine.forward(ready)), expected, rtol=1e-3, atol=1e-4)
    assert "waits for the device" in engine.network.meter.no_graphs
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = create("embed", device=device, dtype="float32")  # can still be captured
    for _ in range(30):
        other.forward(ready)
    assert other.network.meter.read().replayed


def test_graphs_are_captured_anew_after_a_sleep(device: str) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = many(engine, 8)
    expected = np.stack(engine.forward(ready))
    for _ in range(2):
        before = engine.network.meter.read().replayed
        for _ in range(30):
            np.testing.assert_allclose(np.stack(engine.forward(ready)), expected, rtol=1e-3, atol=1e-4)
        assert engine.network.meter.read().replayed > before, engine.network.meter.no_graphs
        engine.network.sleeper.sleep()
        engine.network.sleeper.wake()


def test_page_locked_memory_is_used_again(device: str) -> None:
    engine = create("embed", device=device)
    ready = [one.payload for one in engine.prepare(["the canal", WORDS] * 32)]
    outputs(engine.forward, ready * 10, overlap=True, size=64)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    outputs(engine.forward, ready * 100, overlap=True, size=64)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before + (1 << 20)


def test_a_job_says_how_much_of_the_device_it_filled(device: str, tmp_path: Path) -> None:
    rows = [{"id": str(number), "text": f"{number} {WORDS}"} for number in range(20_000)]
    report = headrace.run(
        rows, str(encoder()), sink=lambda done: None, task="embed", device=device, dtype="float32", progress=False
    )
    assert report.ok == len(rows)
    assert report.memory is not None
    assert report.memory.source == torch.cuda.get_device_name()
    assert 0 < report.memory.peak <= 0.85 * report.memory.limit


def test_the_budget_fills_four_fifths_of_a_small_device(device: str) -> None:
    """Batches as large as the memory allows: every doubling is said to pay."""
    engine = create("embed", device=device, dtype="float32")
    ready = [one.payload for one in engine.prepare([f"{number} {WORDS}" for number in range(64)])]
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (4 << 30)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        watch = MemoryWatch(*memory_of(engine))
        length, budget = ready[0].shape[1], 8_192.0
        for _ in range(40):
            size = int(budget / length)
            engine.forward((ready * (size // 64 + 1))[:size])
            bound = watch.ran(size, size * length)
            budget = min(2 * budget, bound) if bound else budget
        assert 0.7 <= watch.highest / watch.limit.bytes <= 0.88
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def outputs(forward: Any, ready: list[Any], *, overlap: bool, size: int) -> list[Any]:
    """All outputs, through a batcher."""

    async def run() -> list[Any]:
        async with DynamicBatcher[Any, Any](
            forward, max_batch_size=size, max_queue_size=4_096, target_batch_cost=1e9, overlap=overlap
        ) as batcher:
            return [output async for output in batcher.map(ready)]

    return asyncio.run(run())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_does_not_fit_is_split_and_nothing_is_lost(device: str, overlap: bool) -> None:
    engine = create("embed", device=device, dtype="float32")
    ready = [one.payload for one in engine.prepare([f"{number} {WORDS}" for number in range(512)])]
    expected = engine.forward(ready[:2])
    torch.cuda.empty_cache()
    # 512 texts of more than 100 tokens take twice as much at the widest place of the model.
    room = torch.cuda.memory_reserved() + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    failures: list[BaseException] = []

    def forward(batch: list[Any]) -> Any:
        try:
            return engine.forward(batch)
        except EngineOutOfMemoryError as error:
            failures.append(error)
            raise

    try:
        found = outputs(forward, ready, overlap=overlap, size=512)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert failures
    assert len(found) == 512
    torch.testing.assert_close(torch.as_tensor(found[0]), torch.as_tensor(expected[0]), rtol=1e-3, atol=1e-4)


def test_a_closed_engine_gives_its_memory_back(device: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = create("embed", device=device)
    assert torch.cuda.memory_allocated() > before + (10 << 20)
    engine.close()
    gc.collect()
    assert torch.cuda.memory_allocated() < before + (1 << 20)


@pytest.mark.parametrize("task", ["embed", "generate"])
def test_a_model_that_sleeps_frees_the_device_and_wakes_with_the_same_outputs(device: str, task: str) -> None:
    square = torch.ones(64, 64, device=device)
    square @= square  # from here on, PyTorch has its workspace
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine: Any = create(task, device=device)
    ready = payloads(engine, ["1+2=", "3+4="])
    expected = together(engine, ready)
    awake = torch.cuda.memory_allocated()
    sleeper = SLEEPING.of(engine)
    assert sleeper is not None
    for _ in range(3):
        sleeper.sleep()
        assert torch.cuda.memory_allocated() < before + (awake - before) / 4
        sleeper.wake()
        assert torch.cuda.memory_allocated() < before + (awake - before) * 1.1
        assert_same(together(engine, ready), expected)
    engine.close()


def test_weights_that_do_not_fit_end_in_one_line(device: str, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(EngineError, match="does not fit"):
            create("embed", device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
