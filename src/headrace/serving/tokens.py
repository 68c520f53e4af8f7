"""Counts the tokens that a server reads and generates, for requests and batches."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engines.base import Engine
from headrace.engines.profile import profile_of


class TokenCounter:
    """Token counters."""

    def __init__(self, engine: Engine) -> None:
        self.prompt = 0
        self.generated = 0
        self._cost_is_tokens = profile_of(engine).counts_tokens

    def count(self, outputs: Sequence[object], cost: int) -> tuple[int, int]:
        """Add answered records; returns the tokens that they read and generated, 0 if unknown.

        Generated answers hold their token counts; for others, `cost` is the prompt tokens.
        """
        read = made = 0
        generated = [output for output in outputs if isinstance(output, dict) and "completion_tokens" in output]
        if generated:
            read = sum(output["prompt_tokens"] for output in generated)
            made = sum(output["completion_tokens"] for output in generated)
        elif self._cost_is_tokens:
            read = cost
        self.prompt += read
        self.generated += made
        return read, made
