"""Loading models one after the other, which may hang; and giving memory back: parts of a closed engine refer to each
other."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import family_model
from tests.small_models import encoded, picture, text_model, vision_model
from transformers import activations

from headrace.engines.choosing.registry import create
from headrace.engines.networks import files, pytorch
from headrace.engines.networks.pytorch import loading
from headrace.errors import EngineError

TEXTS = ["the mill", "a"]
MODELS: Mapping[str, tuple[str, Callable[[Path], Path | None], Sequence[object]]] = {
    "MiniLM, prepacked": ("embed", lambda folder: None, TEXTS),
    "Flaubert": ("embed", lambda folder: family_model(folder, "Flaubert"), TEXTS),  # its activation is everybody's
    "Electra": ("embed", lambda folder: family_model(folder, "Electra"), TEXTS),
    "Qwen3": ("embed", lambda folder: family_model(folder, "Qwen3"), TEXTS),
    "classifier": ("classify", lambda folder: text_model(folder, hidden_size=256), TEXTS),
    "images": ("image-embed", vision_model, [encoded(picture())]),
}


def outputs(engine: Any, inputs: Sequence[object]) -> Any:
    found = engine.forward([one.payload for one in engine.prepare(inputs)])
    return np.stack([one["score"] if isinstance(one, dict) else one for one in found])


def shared_parts() -> list[torch.nn.Module]:
    """The parts of networks that belong to the whole process, such as `transformers.activations.gelu`."""
    everything = [value for module in list(sys.modules.values()) for value in list(vars(module).values())]
    return [value for value in everything if issubclass(type(value), torch.nn.Module)]


def contents(part: torch.nn.Module) -> dict[str, Any]:
    return {
        name: {inner: id(one) for inner, one in value.items()} if isinstance(value, dict) else id(value)
        for name, value in vars(part).items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_a_closed_engine_leaves_no_weights_and_breaks_no_other(kind: str, tmp_path: Path) -> None:
    task, make, inputs = MODELS[kind]
    folder = make(tmp_path)
    engine, other = (create(task, folder, device="cpu") for _ in range(2))
    expected = outputs(other, inputs)
    shared = shared_parts()
    assert activations.gelu in shared
    before = [contents(part) for part in shared]
    gc.collect()
    own = engine.network.module
    tensors = [*own.parameters(), *own.buffers()]
    tensors += [value for part in own.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    weights = [weakref.ref(tensor) for tensor in tensors]
    assert weights
    del tensors, own
    gc.disable()
    try:
        engine.close()
        engine.close()
        assert [one() for one in weights if one() is not None] == []
    finally:
        gc.enable()
    assert [contents(part) for part in shared] == before
    np.testing.assert_array_equal(outputs(other, inputs), expected)
    np.testing.assert_allclose(outputs(create(task, folder, device="cpu"), inputs), expected, atol=1e-6)


def test_models_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    """transformers changes settings of the whole process meanwhile."""
    entered = threading.Event()

    def other() -> None:
        with loading(tmp_path / "b"):
            entered.set()

    with loading(tmp_path / "a"):
        threading.Thread(target=other).start()
        assert not entered.wait(0.05)
    assert entered.wait(60)


def test_a_load_that_hangs_fails_others_by_its_name_instead_of_blocking_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "TURN_TIMEOUT_S", 0.01)
    with (
        loading(tmp_path / "a"),
        ThreadPoolExecutor(1) as threads,
        pytest.raises(EngineError, match=r"/docstrings cannot be loaded while .*/a is being loaded"),
    ):
        threads.submit(create, "classify", "docstrings").result()
    create("classify", "docstrings").close()


def test_files_that_cannot_be_read_hold_up_no_other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system that is gone."""
    reading, goes_on, read_ahead = threading.Event(), threading.Event(), pytorch.read_ahead

    def stuck(folder: Path, most_bytes: int) -> None:
        if folder == tmp_path:
            reading.set()
            assert goes_on.wait(60)
        read_ahead(folder, most_bytes)

    monkeypatch.setattr(pytorch, "read_ahead", stuck)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(loading(tmp_path).__enter__)
        try:
            assert reading.wait(60)
            create("classify", "docstrings").close()
            assert not hanging.done()
        finally:
            goes_on.set()
