"""A closed engine gives its memory back at once, though the parts of a module refer to each other."""

from __future__ import annotations

import gc
import weakref

from headrace.engines.registry import create


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
