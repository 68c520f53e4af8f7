"""The engine that does nothing. It imports only what every version of Headrace has, for `benchmarks.versions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.engines.base import Prepared


class Noop:
    """An engine that does nothing."""

    pads = False
    default_batch_cost = 1_000_000
    default_batch_size = 256

    def __init__(self, model: str | None = None) -> None:
        del model

    def describe(self) -> Mapping[str, str]:
        """Nothing decides the output."""
        return {"engine": "noop"}

    def prepare(self, inputs: Sequence[str]) -> list[Prepared[str] | Exception]:
        """The texts themselves."""
        return [Prepared(text, 1) for text in inputs]

    def forward(self, batch: list[str]) -> list[list[float]]:
        """A vector of two numbers for each."""
        return [[0.5, 0.25]] * len(batch)

    def close(self) -> None:
        """Nothing to free."""
