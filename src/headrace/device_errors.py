"""What the errors of PyTorch, ONNX Runtime and their libraries mean: out of memory, or a device that is lost.

Known by class, code and message, so that nothing imports those libraries for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.errors import EngineOutOfMemoryError, HeadraceError, ModelCodeError, ProcessError, attempted

_OUT_OF_MEMORY = re.compile(
    r"^(CUDA|HIP|XPU|MPS|Triton)\b.{0,40}\bout of memory"  # also "CUDA error: ", "CUDA driver error: "
    r"|\b(CUBLAS|CUSPARSE|CUSOLVER|CUDNN|HIPBLAS|MIOPEN)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED\b"
    r"|\bCUFFT_ALLOC_FAILED\b"
    r"|\bDefaultCPUAllocator: (can't allocate|not enough) memory\b"
    r"|\bFailed to allocate memory for requested buffer\b"  # ONNX Runtime
)
_LAST_CAPTURE_CODES = range(900, 909)
_REFUSED_CODES = {1, 2, 9, 98, 209, 701, 801, *_LAST_CAPTURE_CODES}
"""Values of cudaError_t: the call was refused, and the device goes on. An invalid argument or configuration, no memory,
no such kernel, too many resources asked for, not supported, not possible in a capture. All others end the context."""
_REFUSED = re.compile(
    r"^CUDA error: (invalid (argument|configuration argument|device function)"
    r"|no kernel image is available|too many resources requested|operation not supported"
    r"|operation (not permitted when|failed due to a previous error|would make the legacy|would result in a merge)"
    r"|(dependency created on|operation not permitted on an event).{0,60}captur)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it means out of memory, so that a smaller batch may succeed."""
    return any(_says_out_of_memory(one) for one in _causes(error))


def is_device_lost(error: BaseException) -> bool:
    """Whether CUDA reports that its context has failed, as after a device-side assert: every later call fails too."""
    if not _is_called(error, "AcceleratorError") or is_out_of_memory(error):
        return False
    code = getattr(error, "error_code", None)
    refused = _REFUSED.match(_said(error)) is not None if code is None else code in _REFUSED_CODES
    return not refused


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, HeadraceError):
        return isinstance(error, EngineOutOfMemoryError)
    if isinstance(error, MemoryError) or _is_called(error, "OutOfMemoryError"):
        return True
    return isinstance(error, Exception) and _OUT_OF_MEMORY.search(_said(error)) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it stands for, and what ended a capture before CUDA said that the capture had failed."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        if isinstance(found, (ModelCodeError, ProcessError)):
            found = found.__cause__
        elif _is_called(found, "AcceleratorError") and "previous error during capture" in _said(found):
            found = found.__cause__ or found.__context__
        else:
            found = None


def _is_called(error: BaseException, name: str) -> bool:
    return any(base.__name__ == name for base in type(error).__mro__)


def _said(error: BaseException) -> str:
    """The first line of its message; empty if it has none, or if its `__str__` raises."""
    text = attempted(str, error)
    return text.strip().partition("\n")[0] if isinstance(text, str) else ""
