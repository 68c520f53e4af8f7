"""Counts the tokens that a server reads and generates, for requests and batches."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engines.base import AnyEngine
from headrace.engines.profile import profile_of


class Tokens:
    """Token counters.

    Args:
        engine: its profile says whether the cost of a record is its tokens.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self.prompt = 0
        self.generated = 0
        self._cost_is_tokens = profile_of(engine).counts_tokens

    def count(self, outputs: Sequence[object], cost: int) -> None:
        """Add answered records. Generated answers hold their token counts; for others, `cost` is the prompt tokens."""
        generated = [output for output in outputs if isinstance(output, dict) and "completion_tokens" in output]
        if generated:
            self.prompt += sum(output["prompt_tokens"] for output in generated)
            self.generated += sum(output["completion_tokens"] for output in generated)
        elif self._cost_is_tokens:
            self.prompt += cost
