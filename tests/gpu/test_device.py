"""What only a device can show: its memory, and that a job goes on when a batch was too large for it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import DynamicBatcher
from headrace.engines.registry import create
from headrace.engines.text.packing import PackedEncoder
from headrace.errors import EngineError, EngineOutOfMemoryError

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
    assert any(isinstance(module, PackedEncoder) for module in there.network.module.modules())
    one, other = (
        torch.as_tensor(np.stack(engine.forward([one.payload for one in engine.prepare(texts)])))
        for engine in (there, here)
    )
    assert float(torch.nn.functional.cosine_similarity(one, other).min()) > 0.99


def test_a_batch_that_does_not_fit_is_split_and_nothing_is_lost(device: str) -> None:
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

    async def run() -> list[Any]:
        async with DynamicBatcher[Any, Any](forward, max_batch_size=512, max_queue_size=512) as batcher:
            return [output async for output in batcher.map(ready)]

    try:
        outputs = asyncio.run(run())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert failures
    assert len(outputs) == 512
    torch.testing.assert_close(torch.as_tensor(outputs[0]), torch.as_tensor(expected[0]), rtol=1e-3, atol=1e-4)


def test_a_closed_engine_gives_its_memory_back(device: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = create("embed", device=device)
    assert torch.cuda.memory_allocated() > before + (10 << 20)
    engine.close()
    gc.collect()
    assert torch.cuda.memory_allocated() < before + (1 << 20)


def test_weights_that_do_not_fit_end_in_one_line(device: str, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(EngineError, match="does not fit"):
            create("embed", device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
