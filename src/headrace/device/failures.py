"""Errors that name the device and the batch, for failures of the device itself: out of memory, and a lost device."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headrace.device.placement import release
from headrace.device_errors import is_device_lost, is_out_of_memory
from headrace.errors import EngineDeadError, EngineOutOfMemoryError


@contextmanager
def naming_device_errors(device: torch.device, what: Callable[[], str]) -> Iterator[None]:
    """Name the device's own failures while the body runs a batch; `what` describes the batch.

    Raises:
        EngineOutOfMemoryError: the batch is too large for the device.
        EngineDeadError: the device failed.
    """
    try:
        # Kernels of Triton and of packages run on the current device, wherever their tensors are.
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    except (RuntimeError, MemoryError) as error:  # PyTorch's own, and those of its libraries
        if is_out_of_memory(error):
            # The frames that it came through hold the tensors of the batch, and who handles the error holds it.
            traceback.clear_frames(error.__traceback__)
            release(device)  # for libraries that take memory of the device itself, such as cuBLAS
            raise EngineOutOfMemoryError(f"{device} has no room for {what()}; lower the batch cost") from error
        if is_device_lost(error):
            raise EngineDeadError(f"{device} failed: {error}") from error
        raise
