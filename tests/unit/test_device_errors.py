"""Errors of a device, as PyTorch words them, and what they mean."""

from __future__ import annotations

import pytest

from headrace.device_errors import is_device_lost, is_out_of_memory
from headrace.errors import EngineDeadError, EngineOutOfMemoryError, ModelCodeError, TransientError, model_code

HELP = "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with TORCH_USE_CUDA_DSA."


class OutOfMemoryError(RuntimeError):
    """As torch's own."""


class AcceleratorError(RuntimeError):
    """As torch's own; CUDA's code is an attribute of those that PyTorch raises itself."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(f"CUDA error: {text}{HELP}")
        if code is not None:
            self.error_code = code


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        EngineOutOfMemoryError("no room"),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        AcceleratorError("out of memory", 2),
        AcceleratorError("out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ],
)
def test_out_of_memory_by_any_of_its_names(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("cannot parse 'my phone is out of memory'"),
        TransientError("CUDA out of memory"),
        EngineDeadError("the engine died: CUDA out of memory"),
        AcceleratorError("device-side assert triggered", 710),
    ],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "code", "is_lost"),
    [
        ("device-side assert triggered", 710, True),
        ("an illegal memory access was encountered", 700, True),
        ("unknown error", 999, True),
        ("invalid configuration argument", 9, False),
        ("no kernel image is available for execution on the device", 209, False),
        ("operation not permitted when stream is capturing", 900, False),
        ("operation failed due to a previous error during capture", 901, False),
    ],
)
@pytest.mark.parametrize("has_code", [True, False])
def test_a_refused_call_leaves_the_device_alive(text: str, code: int, is_lost: bool, has_code: bool) -> None:
    assert is_device_lost(AcceleratorError(text, code if has_code else None)) == is_lost


def test_a_capture_that_ran_out_of_memory_says_so_although_its_end_failed_too() -> None:
    def capture() -> None:
        try:
            raise OutOfMemoryError("CUDA out of memory")
        finally:  # as torch.cuda.graph, which ends the capture in any case
            raise AcceleratorError("operation failed due to a previous error during capture", 901)

    with pytest.raises(AcceleratorError) as caught:
        capture()
    assert is_out_of_memory(caught.value)
    with pytest.raises(ModelCodeError) as wrapped, model_code():
        capture()
    assert is_out_of_memory(wrapped.value)
    try:
        raise OutOfMemoryError("CUDA out of memory")
    except OutOfMemoryError:
        with pytest.raises(AcceleratorError) as later:
            raise AcceleratorError("device-side assert triggered", 710) from None
    assert is_device_lost(later.value), "what came before an error of another kind says nothing"
