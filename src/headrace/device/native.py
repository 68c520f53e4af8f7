"""Which 16-bit dtypes a device computes faster than float32, found by timing a matrix product."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping

import torch

from headrace.device.streams import synchronize

_SHAPES = {"cpu": ((128, 384, 384), (64, 384, 1536)), "cuda": ((16_384, 1024, 1024), (8_192, 1024, 4096))}
"""Rows, inputs and outputs of linear layers. On a CPU, those of a small text encoder: they are measured between two
moments at which other processes take the core. A GPU takes longer to start such a product than to compute it."""
_RUNS = 15
_ENOUGH_S = 0.1
"""Measuring ends after this time, however few the runs."""
_PEAK_SIZE = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes: more than a cache holds."""
_PEAK_S = 0.2
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@functools.cache
def speeds(device: torch.device, *, own: str = "") -> Mapping[str, float]:
    """How many times as fast as float32 a product is in each 16-bit type, on this device; 0 if not supported.

    On a CPU, float16 is only measured if it is the model's `own`: no CPU gains from it, and some lose much.

    Measured once per process; takes milliseconds if the device computes the dtype itself.
    """
    # On one thread: a second core that is busy with something else would hide what this one can do.
    threads = set_threads(1)
    try:
        return {
            name: _speed(dtype, device)
            for name, dtype in _HALVES.items()
            if name in ("bfloat16", own) or device.type != "cpu"
        }
    finally:
        set_threads(threads)


def has_kernels(device: torch.device) -> bool:
    """Whether Headrace's own kernels run on a device: they need Triton, which PyTorch's CUDA builds for Linux bring."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def hardware(device: torch.device) -> dict[str, object]:
    """What decides how fast PyTorch is on this device, beside the CPU's own facts."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": str(torch.__version__), "threads": torch.get_num_threads()}


def gpu_uuid(device: torch.device) -> str:
    """The name by which NVML knows a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def peaks(device_name: str, dtype: str) -> dict[str, float]:
    """Operations per second of a large product, and bytes per second of a copy; empty for a dtype without a product."""
    device, torch_dtype = torch.device(device_name), {"float32": torch.float32, **_HALVES}.get(dtype)
    if torch_dtype is None:
        return {}
    size, copied = _PEAK_SIZE[device.type], _COPIED[device.type]
    matrix = torch.rand(size, size, device=device).to(torch_dtype)
    block = torch.ones(copied // 4, device=device)
    return {
        "operations": 2 * size**3 / best_s(lambda: matrix @ matrix, device),
        "bytes": 2 * copied / best_s(block.clone, device),
    }


def best_s(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The shortest of some runs, in seconds; the first does not count."""
    _seconds(run, device)
    ends = time.perf_counter() + _PEAK_S
    best = _seconds(run, device)
    while time.perf_counter() < ends:
        best = min(best, _seconds(run, device))
    return best


def set_threads(count: int) -> int:
    """Set PyTorch's number of threads on the CPU; returns the number before."""
    before = int(torch.get_num_threads())
    torch.set_num_threads(count)
    return before


def _speed(dtype: torch.dtype, device: torch.device) -> float:
    product = 1.0
    shapes = _SHAPES[device.type]
    for shape in shapes:
        try:
            exact, half = (product_of(shape, one, device) for one in (torch.float32, dtype))
        except RuntimeError:
            return 0.0
        product *= speed_ratio(exact, half, device)
    return float(product ** (1 / len(shapes)))


def product_of(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A call that multiplies states by a layer's weights, already called once."""
    rows, inputs, outputs = shape
    layer = torch.nn.Linear(inputs, outputs, device=device, dtype=dtype)
    states = torch.ones(rows, inputs, device=device, dtype=dtype)
    with torch.inference_mode():
        layer(states)  # the first call chooses a kernel
    return functools.partial(layer, states)


def speed_ratio(exact: Callable[[], torch.Tensor], half: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The best of some runs in turn: other work on the machine makes a run longer, never shorter."""
    best = [float("inf"), float("inf")]
    ends = time.perf_counter() + _ENOUGH_S
    for _ in range(_RUNS):
        for place, run in enumerate((exact, half)):
            best[place] = min(best[place], _seconds(run, device))
        if time.perf_counter() > ends:
            break
    return best[0] / best[1]


def _seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        run()
    if device.type == "cuda":
        synchronize(device)
    return time.perf_counter() - started
