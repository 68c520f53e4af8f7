"""What PyTorch says of memory, and how it takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.device.placement import choose_device, naming_device_errors
from headrace.errors import EngineDeadError, EngineOutOfMemoryError

CPU = torch.device("cpu")


def fails_with(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: torch.empty(1 << 50), EngineOutOfMemoryError),  # PyTorch's own allocator on a CPU: a RuntimeError
        (fails_with(torch.OutOfMemoryError("CUDA out of memory")), EngineOutOfMemoryError),
        (fails_with(torch.AcceleratorError("CUDA error: out of memory")), EngineOutOfMemoryError),
        (fails_with(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`")), EngineOutOfMemoryError),
        (fails_with(torch.AcceleratorError("CUDA error: device-side assert triggered")), EngineDeadError),
        (fails_with(torch.AcceleratorError("CUDA error: invalid configuration argument")), torch.AcceleratorError),
        (fails_with(ValueError("a bad record")), ValueError),
    ],
)
def test_failures_of_the_device_by_what_they_mean(call: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, naming_device_errors(CPU, lambda: "a batch"):
        call()
    assert type(caught.value) is kind


@pytest.mark.parametrize("told", [True, False], ids=["", "PyTorch 2.11"])
@pytest.mark.parametrize("variable", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_gpu_grows_without_gaps_unless_the_user_says_how(
    variable: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:100")
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "".join(given), raising=False)
    if not told:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert choose_device("cpu").type == "cpu"
    assert given == []
    assert choose_device("auto") == torch.device("cuda:1"), "some functions of PyTorch take no device without a number"
    assert given == ([] if variable else ["expandable_segments:True"])
    given[:] = ["max_split_size_mb:20"]  # by the user's own code
    choose_device("auto")
    assert not told or given == ["max_split_size_mb:20"]
