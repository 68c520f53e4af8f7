"""Compiles the kernels for an H100, without one, as they are called for real models; prints the most shared memory."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from headrace.device import kernels

PAGE = 32
SHAPES = [(28, 4, 128, 128), (4, 4, 16, 16), (8, 4, 256, 256), (16, 16, 192, 128)]
"""Heads, heads of keys, their width and that of values: Qwen2.5-7B, the included model, Gemma 2, DeepSeek."""


class H100:
    """What Triton asks a driver for before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """Takes the place of a kernel: compiles it for what it is called with, and starts nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.shared: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(*given: object, **known: object) -> None:
            self.shared.append(self._kernel.warmup(*given, grid=grid, **known).metadata.shared)

        return compiled


if __name__ == "__main__":
    driver.set_active(H100())
    norm = kernels._add_norm_kernel = Compiled(kernels._add_norm_kernel)
    decode = kernels._decode_kernel = Compiled(kernels._decode_kernel)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.zeros(2, 768, dtype=dtype), torch.zeros(768, dtype=dtype)
        kernels.add_norm(x, x, weight, weight, 1e-5)
    for heads, key_heads, width, value_width in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            keys, values = (torch.zeros(PAGE, key_heads, wide, dtype=dtype) for wide in (width, value_width))
            for answers in (1, 512):  # in parts, and whole
                query, lengths = torch.zeros(answers, heads, width, dtype=dtype), torch.ones(answers).int()
                tables = torch.zeros(answers, 32, dtype=torch.int32)
                kernels.paged_decode(query, keys, values, tables, lengths, PAGE, width**-0.5)
    print(max(norm.shared), max(decode.shared))  # noqa: T201 - to the test
