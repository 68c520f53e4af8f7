"""The memory of a CUDA device: how much there is for this process, and the most that it has held."""

from __future__ import annotations

import torch

from headrace.device.memory import AvailableMemory, PeakMeter
from headrace.device.placement import release


class CudaPeakMeter(PeakMeter):
    """The most memory that PyTorch has taken of a device since `restart`, with what it keeps for later tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> bool:
        """Start again, without memory that no tensor uses."""
        release(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    def peak(self) -> int | None:
        return int(torch.cuda.max_memory_reserved(self._device))

    def peaks(self) -> tuple[int, ...]:
        """In bytes. Tensors grow with the batch; what is kept beside them jumps, and grows with gaps."""
        return int(torch.cuda.max_memory_allocated(self._device)), int(torch.cuda.max_memory_reserved(self._device))


def cuda_memory(device: torch.device) -> tuple[AvailableMemory, PeakMeter]:
    """What this process may use of the device, which others may share, and a meter."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    limit = min(free + torch.cuda.memory_reserved(device), allowed)
    return AvailableMemory(limit, f"{torch.cuda.get_device_name(device)}"), CudaPeakMeter(device)
