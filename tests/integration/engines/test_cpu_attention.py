"""Attention on a CPU: two ways with equal outputs, and the faster one is used."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.networks import cpu_attention


@pytest.fixture(autouse=True)
def _timed_anew() -> Iterator[None]:
    cpu_attention.faster.cache_clear()
    yield
    cpu_attention.faster.cache_clear()


@pytest.mark.parametrize("way", [cpu_attention.fused, cpu_attention.by_products])
@pytest.mark.parametrize("masked", ["no mask", "one row", "every row"])
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 40), st.sampled_from([8, 16])),
    scale=st.sampled_from([None, 0.5]),
    at_once=st.sampled_from([1, 5_000, 1 << 21]),
)
@settings(deadline=None, max_examples=25)
def test_each_way_is_attention(
    way: cpu_attention.AttentionWay, masked: str, shape: tuple[int, ...], scale: float | None, at_once: int
) -> None:
    torch.manual_seed(sum(shape))
    queries, keys, values = (torch.randn(shape) for _ in range(3))
    tokens = shape[2]
    rows = {"no mask": 0, "one row": 1, "every row": tokens}[masked]
    hidden = torch.rand(rows, tokens) < 0.5
    hidden[:, 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None] if rows else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_attention, "SCORES_BYTES", at_once)
        found = way(queries, keys, values, mask, scale)
    scores = queries @ keys.transpose(2, 3) * (shape[3] ** -0.5 if scale is None else scale)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    torch.testing.assert_close(found, (weights @ values).transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slow", ["fused", "by_products"])
def test_the_faster_way_is_used(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    quick = {"fused": "by_products", "by_products": "fused"}[slow]
    called: list[str] = []
    clock = [0.0]

    def noting(name: str, seconds: float) -> Any:
        way = getattr(cpu_attention, name)

        def noted(*args: Any) -> torch.Tensor:
            called.append(name)
            clock[0] += seconds
            output: torch.Tensor = way(*args)
            return output

        return noted

    monkeypatch.setattr(cpu_attention, slow, noting(slow, 0.3))
    monkeypatch.setattr(cpu_attention, quick, noting(quick, 0.2))
    monkeypatch.setattr(cpu_attention, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    states = torch.ones(2, 4, 32, 16, dtype=torch.bfloat16)
    cpu_attention.attend(states, states, states, None, None)
    assert called.count(slow) == 3
    called.clear()
    cpu_attention.attend(states, states, states, None, None)
    assert called == [quick]
    cpu_attention.attend(states.float(), states.float(), states.float(), None, None)
    assert called == [quick, "fused"]
