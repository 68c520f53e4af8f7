"""Power, clocks and energy of an NVIDIA GPU, where the package nvidia-ml-py (pynvml) is installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of a GPU."""

    energy_j: float
    """Energy used since its driver was loaded."""
    clock_mhz: float
    """The clock of its processors."""


class Nvml:
    """Reads one GPU.

    Args:
        library: the module pynvml.
        uuid: of the GPU, as PyTorch names it.
    """

    def __init__(self, library: ModuleType, uuid: str) -> None:
        self._library = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def read(self) -> GpuReading | None:
        """The state now; None if this GPU does not tell."""
        nvml = self._library
        try:
            return GpuReading(
                nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000,
                float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
            )
        except nvml.NVMLError:
            return None


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
