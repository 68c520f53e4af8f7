"""Which cores the process of a GPU gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.device.cores import cores_beside, divided

NODES = {"0000:18:00.0": "0-3,16-19", "0000:3b:00.0": "0-3,16-19", "0000:86:00.0": "4-7,20-23", "0000:AF:00.0": "4-7"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two nodes with two GPUs each; the process may use cores 0 to 7."""
    for number, (place, cores) in enumerate(NODES.items()):
        driver, bus = tmp_path / "proc/driver/nvidia/gpus" / place, tmp_path / "sys/bus/pci/devices" / place.lower()
        driver.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t GPU-{number}aa-bb\n")
        bus.mkdir(parents=True)
        (bus / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("headrace.device.cores.first_sibling", lambda core: core)
    return tmp_path


def test_each_gpu_gets_cores_of_its_own_node(root: Path) -> None:
    assert cores_beside(["0", "1", "2", "3"], root) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cores_beside(["3", "0"], root) == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert cores_beside(["GPU-2aa-bb", "GPU-0aa"], root) == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_what_the_system_does_not_tell_leaves_all_cores_to_divide(root: Path, tmp_path: Path) -> None:
    assert cores_beside(["9", "MIG-1"], root) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cores_beside(["0"], tmp_path / "none") == [tuple(range(8))]
    assert cores_beside([str(number) for number in range(9)], tmp_path / "none").count(None) == 1


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_are_even_and_disjoint(parts: int) -> None:
    found = divided(range(8), parts)
    assert sorted(core for part in found for core in part) == list(range(8))
    assert max(map(len, found)) - min(map(len, found)) <= 1
