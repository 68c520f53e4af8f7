"""Loading models one after the other, which may hang; and giving memory back: parts of a closed engine refer to each
other."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.engines.choosing.registry import create
from headrace.engines.networks import pytorch
from headrace.engines.networks.pytorch import loading
from headrace.errors import EngineError


def test_a_closed_engine_leaves_no_weights() -> None:
    engine = create("embed")
    gc.collect()
    weights = weakref.ref(next(engine.network.module.parameters()))
    gc.disable()
    try:
        engine.close()
        assert weights() is None
    finally:
        gc.enable()


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
    monkeypatch.setattr(pytorch, "_TURN_TIMEOUT_S", 0.01)
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
