"""Models sleep and wake with the same outputs. The copies are those for a GPU, from host memory to host memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.engines.fixtures import payloads, together
from tests.small_models import encoded, picture, text_model, vision_model

from headrace.device import sleeping
from headrace.engines.capabilities import SLEEPING
from headrace.engines.choosing.registry import create
from headrace.errors import EngineError

CPU = torch.device("cpu")


def places(module: torch.nn.Module) -> set[int]:
    return {one.data_ptr() for one in (*module.parameters(), *module.buffers()) if one.numel()}


def test_all_weights_move_and_tied_ones_stay_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7), torch.nn.BatchNorm1d(7)).eval()
    module[1].weight = module[0].weight
    module.register_buffer("same", module[0].weight.data)
    with torch.inference_mode():  # as a rotary embedding does for a longer text
        module.register_buffer("late", torch.arange(12.0).view(3, 4).t())
    expected, before = module(torch.tensor([1, 2])), places(module)
    for move in (sleeping.to_host, sleeping.to_device):
        held = [one.detach() for one in module.parameters()]  # the old memory is not given away yet
        move(module, CPU)
        assert not places(module) & before
        before = places(module)
        assert module[0].weight.data_ptr() == module[1].weight.data_ptr() == module.same.data_ptr()
        assert torch.equal(module.late, torch.arange(12.0).view(3, 4).t())
        del held
    assert torch.equal(module(torch.tensor([1, 2])), expected)


class Cudart:
    """Page-locks whole memory that is there, as CUDA's runtime; knows what is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's names
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def rounded_up(*args: Any, **options: Any) -> None:
    """PyTorch's page-locked memory is rounded up to powers of two and kept for ever."""
    assert not options.get("pin_memory"), "15 GB of weights would take 27"


def test_a_model_that_sleeps_takes_its_own_size_of_host_memory_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart, real = Cudart(), torch.empty_like
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: rounded_up(**options) or real(*args, **options))
    monkeypatch.setattr(sleeping, "synchronize", lambda device: None)
    monkeypatch.setattr(sleeping, "release", lambda device: None)
    module = torch.nn.Sequential(*(torch.nn.Linear(1_000, 33 + 2 * number) for number in range(8)))
    size = sum(one.numel() * one.element_size() for one in module.parameters())
    expected = [one.detach().clone() for one in module.parameters()]
    for _ in range(2):
        sleeping.to_host(module, torch.device("cuda"))
        assert size <= sum(cudart.locked.values()) <= 1.01 * size
        [block] = cudart.locked
        assert all(block <= one.data_ptr() < block + size * 1.01 for one in module.parameters())
        sleeping.to_device(module, CPU)  # there is no other device here
        assert not cudart.locked, "given back"
        assert all(map(torch.equal, module.parameters(), expected))
    sleeping.to_host(module, torch.device("cuda"))
    del module
    gc.collect()
    assert not cudart.locked, "a model that is closed while it sleeps gives it back too"


@pytest.mark.parametrize("task", ["classify", "image-classify"])
def test_a_network_sleeps_and_wakes_with_the_same_outputs(task: str, tmp_path: Path) -> None:
    vision = task == "image-classify"
    folder = vision_model(tmp_path) if vision else text_model(tmp_path)
    engine: Any = create(task, folder, device="cpu")
    assert SLEEPING.of(engine) is None, "nothing is gained on a CPU"
    ready = payloads(engine, [encoded(picture())] if vision else ["the mill", "a wheel in the canal"])
    expected = engine.forward(ready)
    engine.network.kind = "cuda"
    sleeper = SLEEPING.of(engine)
    assert sleeper is not None
    engine.network.kind = "cpu"
    for _ in range(2):
        sleeper.sleep()
        with pytest.raises(EngineError, match="wake it first"):
            engine.forward(ready)
        sleeper.wake()
        assert engine.forward(ready) == expected
    sleeper.sleep()
    engine.close()


def test_a_language_model_gives_its_cache_away_and_answers_the_same() -> None:
    engine: Any = create("generate", device="cpu", max_num_seqs=4)
    ready = payloads(engine, [f"{one}+{one + 3}=" for one in range(6)])
    expected = together(engine, ready)
    attention, read = engine._lm.model.config._attn_implementation, engine.prefix_cache_stats()
    assert read.queries > 0
    for _ in range(2):
        engine.sleep()
        assert engine._paged is None
        assert engine.prefix_cache_stats().queries == read.queries
        with pytest.raises(EngineError, match="wake it first"):
            engine.step()
        engine.wake()
        assert engine._lm.model.config._attn_implementation == attention
        assert engine.prefix_cache_stats() == read
        assert together(engine, ready) == expected
        read = engine.prefix_cache_stats()
    engine.close()
