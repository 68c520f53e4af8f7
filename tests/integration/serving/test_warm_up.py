"""A served model's dtype and budget are found when it is loaded, and kept for the next start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_models import text_model

from headrace.app.jobs import tuning
from headrace.app.servers import warm_up as module
from headrace.app.servers.warm_up import WarmedUp, warm_up
from headrace.device.cache import TuningCache
from headrace.engines.base import Engine
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.engines.networks import pytorch as torch_network
from headrace.engines.networks.base import TextBatch
from headrace.testing import FakeEngine


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes in which the model was loaded, in order. bfloat16 is found to be fast, and any gain is one."""

    def measured(device: object) -> Mapping[str, float]:
        return {"bfloat16": 4.0}

    monkeypatch.setattr(torch_network, "speeds", measured)
    monkeypatch.setattr(torch_network, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(tuning, "LEAST_GAIN", 0.0)
    loaded: list[str] = []

    def load(config: EngineConfig) -> Engine:
        loaded.append(config.engine_options.get("dtype", ""))
        return load_engine(config)

    monkeypatch.setattr(module, "load_engine", load)
    monkeypatch.setattr(tuning, "load_engine", load)
    return loaded


def warmed(folder: Path, cache: Path, target_s: float | None = None, **config: Any) -> WarmedUp:
    options = {"device": "cpu", **config.pop("options", {})}
    return warm_up(
        EngineConfig(config.pop("task", "embed"), str(folder), engine_options=options, **config),
        target_s,
        TuningCache(cache),
    )


def test_it_is_found_once_and_kept(encoder_folder: Path, made: list[str], tmp_path: Path) -> None:
    first = warmed(encoder_folder, tmp_path)
    assert first.engine.describe()["dtype"] == "bfloat16"
    assert first.detail.startswith("bfloat16: ") and "cosine >= 0.99" in first.detail
    assert first.tokens is not None and first.tokens >= 256
    again = warmed(encoder_folder, tmp_path)
    assert made == ["", "bfloat16", "", "bfloat16"]
    assert (again.detail, again.tokens) == (first.detail, first.tokens)
    assert again.engine.describe() == first.engine.describe()


def test_what_the_user_set_is_left_alone(encoder_folder: Path, made: list[str], tmp_path: Path) -> None:
    ready = warmed(encoder_folder, tmp_path, options={"dtype": "float32"}, batch_tokens=512)
    assert (ready.budget, ready.detail, made) == (None, "", ["float32"])
    assert ready.engine.describe()["dtype"] == "float32"


def test_pairs_are_tried_where_the_model_takes_those(made: list[str], tmp_path: Path) -> None:
    ready = warmed(text_model(tmp_path / "model", ["score"]), tmp_path / "cache", task="score")
    assert "scores within" in ready.detail


def test_a_target_for_latency_makes_batches_small(
    encoder_folder: Path, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = torch_network.TorchNetwork.run_texts

    def as_long_as_its_tokens(self: torch_network.TorchNetwork, batch: TextBatch, packed: bool) -> Any:
        clock.append(clock[-1] + 1e-4 * int(batch.lengths.sum()))
        return run(self, batch, packed)

    clock = [0.0]
    monkeypatch.setattr(torch_network.TorchNetwork, "run_texts", as_long_as_its_tokens)
    monkeypatch.setattr(torch_network, "MOST_CPU_TOKENS", 1_024)  # a model this small would take more
    monkeypatch.setattr("headrace.app.servers.warm_up.time.perf_counter", lambda: clock[-1])
    ready = warmed(encoder_folder, tmp_path, 0.15)
    assert ready.budget == 512  # some 50 ms; 1,024 tokens take twice as long, and two of these too long


def test_an_engine_without_a_choice_is_served_as_it_is(made: list[str], tmp_path: Path) -> None:
    ready = warm_up(EngineConfig("embed", engine="headrace.testing:FakeEngine"), None, TuningCache(tmp_path))
    assert (ready.budget, ready.detail, made) == (None, "", [""])
    assert isinstance(ready.engine, FakeEngine)


def test_outputs_are_those_of_the_numbers_that_were_found(
    sentence_folder: Callable[..., Path], made: list[str], tmp_path: Path
) -> None:
    ready = warmed(sentence_folder(), tmp_path)
    [one] = ready.engine.prepare(["the mill"])
    assert not isinstance(one, Exception)
    [vector] = ready.engine.forward([one.payload])  # type: ignore[attr-defined]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
