"""Tokens that a server has read and made, of requests and batches alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.base import AnyEngine
from headrace.engines.profile import profile_of


class Tokens:
    """A count of tokens.

    Args:
        engine: says whether a record's cost is its tokens.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self.prompt = 0
        self.generated = 0
        self._cost_is_tokens = profile_of(engine).counts_tokens

    def count(self, outputs: Sequence[Any], cost: int) -> None:
        """Add records that were answered: what a generator's answers say of themselves, else what they cost."""
        if outputs and isinstance(outputs[0], dict) and "completion_tokens" in outputs[0]:
            self.prompt += sum(output["prompt_tokens"] for output in outputs)
            self.generated += sum(output["completion_tokens"] for output in outputs)
        elif self._cost_is_tokens:
            self.prompt += cost
