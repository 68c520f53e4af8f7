"""The double keeps the contract of `BatchEngine` that the bulk path relies on."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from headrace.engines.base import BatchEngine, Prepared
from headrace.errors import ConfigError, RecordError
from headrace.testing import FakeEngine


def test_it_is_a_batch_engine() -> None:
    engine: BatchEngine = FakeEngine()
    assert json.loads(json.dumps(engine.describe())) == engine.describe()
    assert engine.profile.batch_cost >= 1
    assert engine.profile.batch_size >= 1
    engine.close()
    engine.close()


def test_prepare_fails_one_input_alone() -> None:
    ready = FakeEngine(max_model_len=3).prepare(["one two", None, "one two three four", ""])
    assert ready[0] == Prepared("one two", 2)
    assert isinstance(ready[1], RecordError)
    assert ready[2:] == [Prepared("one two three", 3, truncated=True), Prepared("", 1)]
    [refused] = FakeEngine(max_model_len=3, on_too_long="error").prepare(["one two three four"])
    assert isinstance(refused, RecordError)
    with pytest.raises(ConfigError, match="takes 'truncate' or 'error'"):
        FakeEngine(max_model_len=3, on_too_long="split")


def test_forward_gives_each_text_its_own_vector_whatever_the_batch() -> None:
    engine = FakeEngine(dimension=5)
    together = engine.forward(["a", "b", "a"])
    assert together == [engine.forward([text])[0] for text in ("a", "b", "a")]
    assert together[0] != together[1]
    assert FakeEngine("other", dimension=5).forward(["a"]) != [together[0]]
    assert {len(vector) for vector in together} == {5}


def test_two_forwards_at_once_are_noticed() -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(seconds: float) -> Any:
        inside.set()
        go.wait(60)

    engine = FakeEngine(seconds_per_batch=1, sleep=wait)
    first = threading.Thread(target=engine.forward, args=(["a"],))
    first.start()
    inside.wait(60)
    with pytest.raises(RuntimeError, match="while another call runs"):
        engine.forward(["b"])
    go.set()
    first.join()
