"""Parts of a batch on threads of their own: dealt out evenly, computed at the same time, all waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.families import family_model
from tests.small_models import encoded, picture, text_model, vision_model

from headrace.device import cpu_lanes as lanes_module
from headrace.device.cpu_lanes import CpuLanes, cpu_lanes, dealt
from headrace.engines.capabilities import BESIDE
from headrace.engines.choosing.registry import create
from headrace.errors import EngineOutOfMemoryError

WORDS = ["the", "canal", "feeds", "the", "mill", "wheel", "so", "that", "it", "never", "runs", "dry"]
TEXTS = [" ".join(WORDS[: 1 + n % len(WORDS)]) * (1 + n % 7) for n in range(60)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> list[int]:
    """How many texts each part held that a lane has computed."""
    found: list[int] = []
    own, spare = CpuLanes.map, CpuLanes.alone

    def noting(self: CpuLanes, call: Any, parts: Any) -> Any:
        found.extend(map(len, parts))
        return own(self, call, parts)

    def noting_alone(self: CpuLanes, call: Any, part: Any) -> Any:
        found.append(1)
        return spare(self, call, part)

    monkeypatch.setattr(CpuLanes, "map", noting)
    monkeypatch.setattr(CpuLanes, "alone", noting_alone)
    return found


def forward(engine: Any, texts: Sequence[object]) -> Any:
    return engine.forward([one.payload for one in engine.prepare(texts)])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_a_batch_in_parts_has_the_outputs_of_its_texts_in_order(parts: list[int], dtype: str) -> None:
    engine = create("embed", device="cpu", dtype=dtype)
    parts.clear()
    together = np.stack(forward(engine, TEXTS))
    assert parts == [30, 30]
    alone = np.stack([forward(engine, [text])[0] for text in TEXTS])
    assert set(parts[2:]) == {1}  # the shortest, each on the spare lane
    assert len(parts) < 2 + len(TEXTS)
    assert (together * alone).sum(1).min() > (0.99999 if dtype == "float32" else 0.999)


def test_a_short_batch_is_computed_beside_a_large_one(two_threads: None) -> None:
    engine: Any = create("embed", device="cpu")
    lanes, begun, short_done = cpu_lanes(), threading.Event(), threading.Event()
    assert lanes is not None

    def large(_: int) -> bool:
        begun.set()
        return short_done.wait(60)

    thread = threading.Thread(target=lanes.map, args=(large, [0, 1]))
    thread.start()
    begun.wait(60)
    for some in (TEXTS[:1], TEXTS[:8], [" ".join(WORDS * 40)]):
        assert sum(one.cost for one in engine.prepare(some)) < 300
        assert len(forward(engine, some)) == len(some)
    short_done.set()
    thread.join()
    assert BESIDE.of(engine) is not None


def test_large_batches_leave_a_lane_where_they_are_told_to(parts: list[int]) -> None:
    engine: Any = create("embed", device="cpu")
    before = forward(engine, TEXTS)
    engine.beside.leave_room(True)
    parts.clear()
    np.testing.assert_allclose(forward(engine, TEXTS), before, atol=1e-5)
    assert parts == [60]


def test_labels_of_a_batch_in_parts_are_in_order(parts: list[int], tmp_path: Path) -> None:
    engine = create("classify", text_model(tmp_path, hidden_size=256, initializer_range=0.1), device="cpu")
    parts.clear()
    found = forward(engine, TEXTS * 4)
    assert parts == [120, 120]
    for text, label in zip(TEXTS, found, strict=False):
        [alone] = forward(engine, [text])
        assert label["label"] == alone["label"]
        assert label["score"] == pytest.approx(alone["score"], abs=1e-5)


def test_models_that_keep_their_padding_are_not_computed_in_parts(parts: list[int], tmp_path: Path) -> None:
    padded = create("embed", family_model(tmp_path, "MPNet"), device="cpu", max_model_len=200)
    parts.clear()
    forward(padded, TEXTS * 4)
    assert parts == []


def test_a_part_that_runs_out_of_memory_fails_the_batch_by_its_name(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create("embed", device="cpu")
    own, lock, calls = engine.network.call, threading.Lock(), []

    def second_fails(tensors: Any) -> Any:
        with lock:
            calls.append(len(tensors["starts"]) - 1)
            if len(calls) == 2:
                raise MemoryError
        return own(tensors)

    monkeypatch.setattr(engine.network, "call", second_fails)
    with pytest.raises(EngineOutOfMemoryError, match="no room for 60 texts of up to 79 tokens"):
        forward(engine, TEXTS)
    assert calls == [30, 30]
    assert len(forward(engine, TEXTS)) == 60


@given(st.lists(st.integers(1, 1_000), min_size=3, max_size=60), st.integers(2, 3))
def test_parts_hold_every_item_once_and_are_about_equal(sizes: list[int], parts: int) -> None:
    places = dealt(np.array(sizes), parts)
    assert sorted(np.concatenate(places).tolist()) == list(range(len(sizes)))
    assert max(map(len, places)) - min(map(len, places)) <= 1
    totals = [sum(sizes[place] for place in part) for part in places]
    assert max(totals) - min(totals) <= max(sizes)


def test_parts_run_at_the_same_time_in_order_of_their_results() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def call(part: str) -> str:
        meeting.wait()
        return part + part

    assert CpuLanes(3, 1).map(call, ["a", "b", "c"]) == ["aa", "bb", "cc"]


def test_an_error_is_raised_when_the_other_parts_have_ended() -> None:
    lanes, ended = CpuLanes(2, 1), threading.Event()

    def call(part: str) -> None:
        if part == "bad":
            raise MemoryError(part)
        assert not ended.wait(0.05)
        ended.set()

    with pytest.raises(MemoryError, match="bad"):
        lanes.map(call, ["bad", "good"])
    assert ended.is_set()
    assert lanes.map(str, [1, 2]) == ["1", "2"]


def test_lanes_share_the_threads_of_pytorch_and_leave_others_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        lanes = CpuLanes(2, 2)
        assert lanes.map(lambda _: torch.get_num_threads(), [0, 0]) == [2, 2]
        assert torch.get_num_threads() == 4
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [4]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "count"), [(1, None), (2, 2), (3, 3), (4, 2), (5, None), (9, 3)])
def test_a_process_has_lanes_where_its_threads_can_be_shared(threads: int, count: int | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lanes = cpu_lanes()
        assert (lanes and lanes.count) == count
        assert cpu_lanes() is lanes
    finally:
        torch.set_num_threads(before)


def test_images_of_a_batch_in_parts_are_in_order(parts: list[int], tmp_path: Path) -> None:
    engine = create("image-embed", vision_model(tmp_path), device="cpu")
    images = [encoded(picture(20 + n, 30, seed=n)) for n in range(5)]
    parts.clear()
    together = forward(engine, images)
    assert parts == [3, 2]
    for image, vector in zip(images, together, strict=True):
        np.testing.assert_allclose(vector, forward(engine, [image])[0], rtol=1e-4, atol=1e-5)
    assert parts == [3, 2]


def test_threads_that_begin_together_share_lanes_and_keep_their_number_of_threads(two_threads: None) -> None:
    lanes_module._lanes_of.cache_clear()
    meeting = threading.Barrier(8, timeout=60)
    found: list[tuple[int, int]] = []

    def ask() -> None:
        meeting.wait()
        found.append((id(cpu_lanes()), torch.get_num_threads()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {(id(cpu_lanes()), 2)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_makes_its_own_lanes() -> None:
    code = (
        "import os, torch\n"
        "torch.set_num_threads(2)\n"
        "from headrace.device.cpu_lanes import cpu_lanes\n"
        "before = cpu_lanes()\n"
        "child = os.fork()\n"
        "if not child: os._exit(cpu_lanes().map(int, ['7', '8']) != [7, 8])\n"
        "assert os.waitpid(child, 0)[1] == 0 and cpu_lanes() is before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
