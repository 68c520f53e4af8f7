"""Loading one model after the other, and giving memory back: parts of a closed engine refer to each other."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

from headrace.engines.choosing.registry import create
from headrace.engines.networks.pytorch import loading


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


def test_models_are_loaded_one_after_the_other() -> None:
    """transformers changes settings of the whole process meanwhile."""
    entered = threading.Event()

    def other() -> None:
        with loading(Path("b")):
            entered.set()

    with loading(Path("a")):
        threading.Thread(target=other).start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
