"""Requests while the engine computes their answers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engines.generation.causal_lm import TokenizedRequest
from headrace.engines.generation.sampling import TokenSampler


@dataclass(slots=True)
class Answer:
    """A request in the engine."""

    ask: TokenizedRequest
    sampler: TokenSampler
    before: tuple[int, ...]
    """Generated before the request was removed and resumed."""
    cached: int | None = None
    """Tokens of the prompt that the prefix cache held when it began; None before."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A removed request with the tokens it has generated."""

    ask: TokenizedRequest
    sampler: TokenSampler
    generated: tuple[int, ...]
    cached: int | None
