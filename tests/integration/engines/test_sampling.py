"""Tokens are chosen in one call for all answers, each by its own parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.generation.sampling import TokenSampler, choose, uniform
from headrace.engines.requests.generation import Sampling

VOCABULARY = 70
PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 1, 5, 200]),
    "top_p": st.sampled_from([1.0, 0.7, 1e-9]),
    "min_p": st.sampled_from([0.0, 0.2]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 1.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.5]),
    "min_tokens": st.sampled_from([0, 3]),
}


class Allowed:
    """Allows the same tokens everywhere."""

    forced = ()

    def __init__(self, tokens: Sequence[int]) -> None:
        bits = [sum(1 << token % 32 for token in tokens if token // 32 == word) for word in range(-(-VOCABULARY // 32))]
        self._bits = torch.tensor(bits).to(torch.int32)

    def fill(self, generated: Sequence[int]) -> torch.Tensor:
        return self._bits

    def chosen(self, token: int) -> None:
        """It needs nothing of the answer."""


@st.composite  # type: ignore[untyped-decorator]
def rows(draw: st.DrawFn) -> tuple[TokenSampler, list[int]]:
    ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
    sampling = Sampling(**{name: draw(values) for name, values in PARAMETERS.items()})
    guide = Allowed(draw(ids.filter(len))) if draw(st.booleans()) else None
    sampler = TokenSampler(
        sampling, draw(ids), draw(st.integers(0, 99)), frozenset({2}), draw(st.sampled_from([None, 2]))
    )
    sampler.guide = guide
    return sampler, draw(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6), st.integers(0, 1000))
def test_company_changes_no_token_and_no_log_probability(answers: list[Any], seed: int) -> None:
    logits = torch.randn(len(answers), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    samplers, generated = [one for one, _ in answers], [ids for _, ids in answers]
    together = choose(logits, samplers, generated)
    noted = [sampler.found for sampler in samplers]
    for sampler in samplers:
        sampler.found = []
    alone = [choose(row[None], [one], [ids])[0] for row, (one, ids) in zip(logits, answers, strict=True)]
    assert together == alone
    assert [sampler.found for sampler in samplers] == noted
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 0.85}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.83}, [0, 1]),  # of what top_k leaves
        ({"min_tokens": 1}, [1, 2, 3]),  # token 0 ends the answer
    ],
)
def test_tokens_are_drawn_as_often_as_is_probable(parameters: dict[str, Any], kept: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    samplers = [TokenSampler(Sampling(temperature=1.0, **parameters), [], seed, frozenset({0})) for seed in range(4000)]
    logits = probabilities.log().expand(len(samplers), -1)
    counts = torch.tensor(choose(logits, samplers, [[]] * len(samplers))).bincount(minlength=4)
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert torch.equal(counts > 0, expected > 0)
    assert (counts / len(samplers) - expected).abs().max() < 0.03


def test_the_numbers_of_an_answer_follow_from_seed_and_position_alone() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(numbers)) == 1600
    assert 0.47 < sum(numbers) / 1600 < 0.53
    assert numbers[41] == uniform(1, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_allows_only_its_tokens_even_an_end_token_before_its_time(temperature: float) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7] = 50.0
    sampler = TokenSampler(Sampling(temperature=temperature, min_tokens=5), [], 0, frozenset({2}))
    for allowed in ([40], [2], [31], [69, 2]):
        sampler.guide = Allowed(allowed)
        assert choose(logits, [sampler], [[]]) == [allowed[0]]


def test_the_host_reads_one_number_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    to_list = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        read.append(tensor.numel())
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    for name in ("item", "cpu", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"the host reads with {name}"))
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1.0, min_tokens=2)
    samplers = [TokenSampler(sampling, [1], seed, frozenset({2})) for seed in range(3)]
    choose(torch.randn(3, VOCABULARY), samplers, [[1], [], [4, 4]])
    assert read == [3]
