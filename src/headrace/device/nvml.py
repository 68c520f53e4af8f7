"""Power, clocks, energy and counters of an NVIDIA GPU, where the package nvidia-ml-py (pynvml) is installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

_COUNTERS = (1, 5, 10)
"""NVML_GPM_METRIC_GRAPHICS_UTIL, ANY_TENSOR_UTIL and DRAM_BW_UTIL of nvml.h, in percent."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of a GPU."""

    energy_j: float
    """Energy used since its driver was loaded."""
    clock_mhz: float
    """The clock of its processors."""
    power_limit_w: float
    """The power that it may take now."""
    counters: object = None
    """Its counters since it was started; None before the architecture Hopper, which has the first."""


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """Fractions of a time, from a GPU's own counters. They hold for all programs on it."""

    kernels: float
    """In which any kernel ran."""
    tensor_cores: float
    """In which the tensor cores computed, on average over its processors."""
    memory: float
    """The share of its memory's bandwidth."""


class Nvml:
    """Reads one GPU.

    Args:
        uuid: of the GPU, as PyTorch names it.
    """

    def __init__(self, library: ModuleType, uuid: str) -> None:
        self._library = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def read(self) -> GpuReading | None:
        nvml = self._library
        try:
            return GpuReading(
                nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000,
                float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
                nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000,
                self._counters(),
            )
        except nvml.NVMLError:
            return None

    def activity(self, first: GpuReading, last: GpuReading) -> GpuActivity | None:
        """What the GPU did between two readings; None if it does not tell. To be asked once for a reading."""
        nvml = self._library
        if first.counters is None or last.counters is None:
            return None
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_COUNTERS)
        asked.sample1, asked.sample2 = first.counters, last.counters
        for place, number in enumerate(_COUNTERS):
            asked.metrics[place].metricId = number
        try:
            nvml.nvmlGpmMetricsGet(asked)
            return GpuActivity(*(asked.metrics[place].value / 100 for place in range(len(_COUNTERS))))
        except nvml.NVMLError:
            return None
        finally:
            nvml.nvmlGpmSampleFree(first.counters)
            nvml.nvmlGpmSampleFree(last.counters)

    def _counters(self) -> object:
        nvml = self._library
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            sample = nvml.nvmlGpmSampleAlloc()
        except nvml.NVMLError:
            return None
        try:
            nvml.nvmlGpmSampleGet(self._handle, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            return None
        held: object = sample
        return held


def open_gpu(uuid: str, library: ModuleType | None = None) -> Nvml | None:
    """A reader of this GPU; None without pynvml or a driver."""
    if library is None:
        if importlib.util.find_spec("pynvml") is None:
            return None
        library = importlib.import_module("pynvml")
    try:
        return Nvml(library, uuid)
    except library.NVMLError:
        return None
