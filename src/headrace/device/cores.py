"""Which cores are near which GPU, and how cores are divided. From the system's files, without CUDA or NVML."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.device.memory import read_text


def own_cores() -> list[int]:
    """The cores that this process may use, those of one physical core side by side."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted(cores, key=lambda core: (first_sibling(core), core))


def divided(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """The cores in parts of nearly the same size, neighbours together."""
    bounds = [len(cores) * index // parts for index in range(parts + 1)]
    return [tuple(cores[low:high]) for low, high in itertools.pairwise(bounds)]


def cores_beside(gpus: Sequence[str], root: Path = Path("/")) -> list[tuple[int, ...] | None]:
    """Cores for the process of each GPU: those of its NUMA node, divided between the GPUs there.

    None for all cores, where there are fewer than GPUs.

    Args:
        gpus: their numbers or UUIDs, as in CUDA_VISIBLE_DEVICES. Numbers are in the order of the PCI bus, which CUDA
            keeps among GPUs of one model.
    """
    allowed = own_cores()
    near = [_near(place, allowed, root) for place in _places(gpus, root)]
    parts = {node: iter(divided(node, near.count(node))) for node in set(near)}
    return [next(parts[node]) or None for node in near]


def _places(gpus: Sequence[str], root: Path) -> list[str | None]:
    """The address of each GPU on the PCI bus; None if it cannot be told."""
    found = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    uuids = {folder.name: read_text(folder / "information") for folder in found}
    places: list[str | None] = []
    for gpu in gpus:
        if gpu.isdecimal():
            places.append(found[int(gpu)].name if int(gpu) < len(found) else None)
        else:
            places.append(next((name for name, text in uuids.items() if gpu in text), None))
    return places


def _near(place: str | None, allowed: Sequence[int], root: Path) -> tuple[int, ...]:
    """The allowed cores near a place on the bus; all of them where that is not known."""
    local = _listed(read_text(root / "sys/bus/pci/devices" / place.lower() / "local_cpulist")) if place else set()
    return tuple(core for core in allowed if core in local) or tuple(allowed)


def first_sibling(core: int) -> int:
    text = read_text(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    return min(_listed(text), default=core)


def _listed(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
