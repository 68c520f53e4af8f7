"""How the devices of a machine are divided between workers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from headrace.cluster import local_workers
from headrace.cluster.local_workers import device_shares
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the numbers of CUDA devices and CPU cores."""

    def set_devices(cuda: int, cores: int = 8, visible: str | None = None) -> None:
        monkeypatch.setattr(local_workers, "cuda_devices", lambda: cuda)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr("headrace.device.cores.first_sibling", lambda core: core)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_devices


def config(**options: object) -> EngineConfig:
    return EngineConfig("embed", engine_options=options)


def visible(size: Any, **options: object) -> list[str]:
    return [share.environment["CUDA_VISIBLE_DEVICES"] for share in device_shares(size, config(**options))]


def test_each_worker_sees_one_cuda_device(machine: Any) -> None:
    machine(4)
    assert visible(2) == ["0", "1"]
    assert visible("auto") == ["0", "1", "2", "3"]
    assert visible(1, device="cuda") == ["0"]
    assert [share.cores for share in device_shares(4, config())] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    machine(4, cores=2)
    assert {share.cores for share in device_shares(4, config())} == {None, (0,), (1,)}


def test_devices_are_chosen_among_those_that_are_visible(machine: Any) -> None:
    machine(3, visible="5,GPU-aa,7")
    assert visible("auto") == ["5", "GPU-aa", "7"]


def test_an_engine_that_needs_several_devices_gets_neighbours(machine: Any) -> None:
    machine(8)
    assert visible(2, tensor_parallel_size=2) == ["0,1", "2,3"]
    assert visible("auto", tensor_parallel_size=2, pipeline_parallel_size=2) == ["0,1,2,3", "4,5,6,7"]
    assert visible("auto", data_parallel_size=4) == ["0,1,2,3", "4,5,6,7"]


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_cpu_cores_are_divided_evenly_and_each_belongs_to_one_worker(machine: Any, device: str, workers: int) -> None:
    machine(2 if device == "cpu" else 0)
    shares = device_shares(workers, config(device=device))
    cores = [share.cores or () for share in shares]
    assert sorted(core for group in cores for core in group) == list(range(8))
    assert max(map(len, cores)) - min(map(len, cores)) <= 1
    assert not any(share.environment for share in shares)


def test_auto_is_one_worker_on_a_cpu(machine: Any) -> None:
    machine(0)
    assert [share.cores for share in device_shares("auto", config())] == [tuple(range(8))]


@pytest.mark.parametrize(
    ("cuda", "size", "options", "message"),
    [
        (0, 9, {}, "it must be at most 8"),
        (2, 3, {}, "3 workers need 3 CUDA devices, and PyTorch sees 2"),
        (0, 1, {"device": "cuda"}, "1 workers need 1 CUDA devices, and PyTorch sees 0"),
        (2, 2, {"tensor_parallel_size": 2}, "2 workers of 2 devices need 4 CUDA devices, and PyTorch sees 2"),
        (2, "auto", {"tensor_parallel_size": 4}, "1 workers of 4 devices need 4 CUDA devices"),
        (2, 2, {"device": "cuda:1"}, 'device="cuda:1" is a single device'),
    ],
)
def test_too_few_devices_are_refused(machine: Any, cuda: int, size: Any, options: Any, message: str) -> None:
    machine(cuda)
    with pytest.raises(ConfigError, match=message):
        device_shares(size, config(**options))
