"""A thread that has loaded a model leaves no OpenMP threads behind, which would slow down the thread of the batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.device.openmp import end_workers
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "libgomp" not in Path("/proc/self/maps").read_text(),
    reason="PyTorch starts no GNU OpenMP threads here",
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    end_workers()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compute() -> None:
    torch.ones(2_000_000).exp()


def test_the_workers_of_a_thread_end_and_start_again_with_their_settings() -> None:
    end_workers()
    few = threads()
    compute()
    assert threads() == few + 1
    end_workers()
    assert threads() == few
    assert torch.get_num_threads() == 2
    compute()
    assert threads() == few + 1


def test_a_model_that_was_loaded_leaves_none() -> None:
    config = EngineConfig("embed", engine_options={"device": "cpu", "dtype": "float32"})
    load_engine(config).close()  # loading for the first time starts other threads
    few = threads()
    load_engine(config).close()
    assert threads() == few
    end_workers()
    assert threads() == few, "it had left some"


def test_a_machine_without_maps_is_left_alone(tmp_path: Path) -> None:
    end_workers(tmp_path / "none")
    odd = tmp_path / "maps"
    odd.write_text("7f-8f r--p 0 08:01 42                  /no/such/libgomp.so.1\n7f-8f rw-p 0 00:00 0\n")
    end_workers(odd)
