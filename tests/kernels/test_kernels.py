"""Each kernel against PyTorch in float64: on a GPU, or in Triton's interpreter (scripts/test-kernels)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds; scripts/test-kernels installs it")

from tests.kernels import by_pytorch  # noqa: E402 - after the environment is set

from headrace.device import kernels  # noqa: E402
from headrace.device.cuda_graphs import MemoryRead  # noqa: E402

PAGE = 32
ROOM = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", ROOM)
@pytest.mark.parametrize("width", [96, 768, 1000])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sum_is_normalised(dtype: torch.dtype, width: int, adds: bool, biased: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = (
        torch.randn(shape, device=DEVICE).to(dtype) for shape in ((2, 5, width), (2, 5, width), (width,), (width,))
    )
    given = (x, residual if adds else None, weight, bias if biased else None, 1e-5)
    found, expected = kernels.add_norm(*given), by_pytorch.add_norm(*given)
    assert found.shape == x.shape and found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=ROOM[dtype], atol=ROOM[dtype])


def test_nothing_normalised_is_nothing() -> None:
    weight = torch.ones(8, device=DEVICE)
    assert kernels.add_norm(torch.empty(0, 8, device=DEVICE), None, weight, None, 1e-5).shape == (0, 8)


def test_a_graph_keeps_the_weights_that_it_reads() -> None:
    x, weight, bias = torch.randn(2, 96, device=DEVICE), torch.ones(96, device=DEVICE), torch.ones(96, device=DEVICE)
    with MemoryRead() as read:
        weight.detach()
    assert set(read.kept) == {weight.untyped_storage().data_ptr()}
    seen: list[int] = []
    with MemoryRead() as read:
        try:
            kernels.add_norm(x, None, weight, bias, 1e-5)
        finally:
            seen += read.kept
    assert {one.untyped_storage().data_ptr() for one in (weight, bias)} <= set(seen)


CASES = {
    "heads that share keys": (4, 2, 16, 16, [1, 33, 64, 200, 600], None),
    "a width that is no power of two": (6, 6, 80, 80, [5, 70, 700], None),
    "values of another width": (8, 2, 64, 32, [900, 3], None),
    "a window": (4, 1, 32, 32, [400, 31, 1000], 100),
    "a window of less than a page": (4, 2, 16, 16, [20, 9], 8),
    "many answers": (7, 1, 16, 16, list(range(1, 141)), None),
    "Qwen2.5-7B": (28, 4, 128, 128, [700, 33], None),
    "the widest heads": (8, 4, 256, 256, [300, 1], 256),
}


# The interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", ROOM if DEVICE == "cuda" else [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_answers_attend_to_the_keys_in_their_pages(dtype: torch.dtype, case: str) -> None:
    heads, key_heads, width, value_width, lengths, window = CASES[case]
    torch.manual_seed(0)
    counts = [-(-length // PAGE) for length in lengths]
    pages = torch.randperm(sum(counts) + 2)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = pages[sum(counts[:row]) :][:count]
    query = torch.randn(1, heads, len(lengths), width).to(DEVICE, dtype)[0].transpose(0, 1)
    keys = torch.randn(len(pages) * PAGE, key_heads, width).to(DEVICE, dtype)
    values = torch.randn(len(pages) * PAGE, key_heads, value_width).to(DEVICE, dtype)
    counted = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    given = (query, keys, values, tables.to(DEVICE), counted, PAGE, width**-0.5, window)
    found, expected = kernels.paged_decode(*given), by_pytorch.paged_decode(*given)
    assert found.shape == expected.shape and found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=ROOM[dtype], atol=ROOM[dtype])


def test_steps_of_all_sizes_share_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling one takes seconds, in which a job stands still."""
    constants: list[frozenset[tuple[str, object]]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **known: constants.append(frozenset(known.items()))

    monkeypatch.setattr(kernels, "_decode_kernel", Launches())
    stored = torch.zeros(PAGE, 2, 16)
    for answers in (1, 2, 3, 5, 8, 13, 40, 130, 300):
        for pages in (1, 9, 40, 130):
            tables = torch.zeros(answers, pages, dtype=torch.int32)
            lengths = torch.ones(answers, dtype=torch.int32)
            kernels.paged_decode(torch.zeros(answers, 4, 16), stored, stored, tables, lengths, PAGE, 1.0)
    assert len(constants) == 36 and len(set(constants)) == 2


@pytest.mark.timeout(300)
def test_they_compile_for_an_h100_and_fit_into_its_shared_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert all(int(shared) <= 227 << 10 for shared in done.stdout.split())
