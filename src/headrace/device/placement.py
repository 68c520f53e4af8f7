"""The device and dtype of a model, and errors for failures of the device."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from headrace.device import names
from headrace.device.streams import CAPTURING
from headrace.device_errors import is_device_lost, is_out_of_memory
from headrace.errors import ConfigError, EngineDeadError, EngineOutOfMemoryError, first_line

logger = logging.getLogger("headrace")

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}
_ALLOCATION_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def choose_device(device: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one.

    Raises:
        ConfigError: an unknown name, or a CUDA device this machine does not have.
    """
    if device == "auto":
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            usable = torch.cuda.is_available()
        for one in found:  # such as a driver that is too old
            logger.warning("the model runs on the CPU: %s", str(one.message).partition("\n")[0])
        if usable:
            grow_segments()
        return _with_index(torch.device("cuda")) if usable else torch.device("cpu")
    names.check_device(device)
    chosen = torch.device(device)
    if chosen.type == "cuda" and ((reason := _why_no_cuda()) or (chosen.index or 0) >= torch.cuda.device_count()):
        count = 0 if reason else torch.cuda.device_count()
        says = f" (PyTorch says: {reason})" if reason else ""
        raise ConfigError(f"device {device!r}: PyTorch sees {count} CUDA devices; use ``device=cpu``{says}")
    if chosen.type != "cuda":
        return chosen
    grow_segments()
    return _with_index(chosen)


def _with_index(device: torch.device) -> torch.device:
    """The CUDA device by its number: some functions of PyTorch take no other."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def grow_segments() -> None:
    """Let PyTorch's pieces of a GPU's memory grow, so that batches of many sizes do not leave gaps in it.

    Not if the user has set how PyTorch allocates. It is a setting of this process alone: in the environment it would
    reach processes that cannot have it, such as vLLM's with its own pools of memory.
    """
    given = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # PyTorch 2.11 does not tell
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setting is not None and not given() and not any(os.environ.get(name) for name in _ALLOCATION_VARIABLES):
        setting(_GROWING)


def _why_no_cuda() -> str:
    """Why PyTorch cannot use CUDA here, such as a driver that is too old; empty if it can."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # without CUDA, PyTorch asserts that it has it
        return first_line(error).rstrip(".")
    return ""


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype | Literal["auto"]:
    """The dtype to load weights in; "auto" is float32 on a CPU and the weights' own on CUDA.

    Raises:
        ConfigError: an unknown name.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    names.check_dtype(dtype)
    return DTYPES[dtype]


def release(device: torch.device) -> None:
    """Give memory that no tensor uses any more back to the device, or to the system."""
    if device.type == "cuda":
        with CAPTURING:  # PyTorch cannot empty its cache meanwhile
            torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


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
