"""Which limit binds a job's device: the host, launches, memory bandwidth or computing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.events import DeviceUsed

Limit: TypeAlias = Literal["host", "launch", "memory bandwidth", "compute"]

_HOST = 0.3
"""Fraction of the wall time without computing, from which on the host is the limit."""
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What the device of a run did."""

    computed: float
    """Fraction of the wall time in forward passes."""
    operations_per_record: float
    """Floating-point operations; 0 if unknown."""
    operations_per_s: float
    """While it computed."""
    mfu: float | None
    """Model FLOPs utilisation: those, as a fraction of the measured peak; None without a peak."""
    limit: Limit | None
    """None if unknown."""
    dtype: str
    watts: float | None
    """The mean of the run, by NVML; None if unknown."""
    joules_per_record: float | None
    clock_mhz: float | None
    power_limit_w: float | None = None
    """The power that the GPU may take; None if unknown."""
    kernels: float | None = None
    """Fraction of the wall time in which any kernel ran, by the GPU's counters; None if unknown."""
    tensor_cores: float | None = None
    """Fraction of the wall time in which the tensor cores computed."""
    memory_bus: float | None = None
    """Fraction of the bandwidth of the GPU's memory."""
    replayed: float = 0.0
    """Share of the passes that were replays of captured work (CUDA graphs)."""
    no_graphs: str = ""
    """Why there were no replays, or no more; empty if nothing was in the way."""


def device_figures(
    used: DeviceUsed | None, wall_s: float, records: int, fixed_s: float | None, batches: int
) -> DeviceFigures | None:
    """The figures of a run; None if nothing ran or was measured.

    Args:
        fixed_s: what a batch takes beside what grows with its cost; None if unknown.
    """
    if used is None or wall_s <= 0 or used.computed_s <= 0 or not records:
        return None
    rate = used.operations / used.computed_s
    return DeviceFigures(
        computed=min(used.computed_s / wall_s, 1.0),
        operations_per_record=used.operations / records,
        operations_per_s=rate,
        mfu=rate / used.peak_operations if used.peak_operations and used.operations else None,
        limit=_limit(used, wall_s, (fixed_s or 0.0) * batches),
        dtype=used.dtype,
        watts=None if used.energy_j is None else used.energy_j / wall_s,
        joules_per_record=None if used.energy_j is None else used.energy_j / records,
        clock_mhz=used.clock_mhz,
        power_limit_w=used.power_limit_w,
        kernels=used.kernels,
        tensor_cores=used.tensor_cores,
        memory_bus=used.memory_bus,
        replayed=used.replayed,
        no_graphs=used.no_graphs,
    )


def _limit(used: DeviceUsed, wall_s: float, fixed_s: float) -> Limit | None:
    """Checked in this order, since each hides those after it."""
    if used.computed_s < (1 - _HOST) * wall_s:
        return "host"
    if fixed_s >= _HALF * used.computed_s:
        return "launch"
    if not used.peak_operations or not used.peak_bytes:
        return None
    moving, computing = used.weight_bytes / used.peak_bytes, used.operations / used.peak_operations
    return "memory bandwidth" if moving > computing else "compute"
