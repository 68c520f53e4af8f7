"""`TokenBatcher`: a `DynamicBatcher` whose cost is counted in tokens."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.batching.batcher import DynamicBatcher
from headrace.batching.cost import CostRule, TokenEstimatorFn
from headrace.batching.options import function, number
from headrace.errors import ConfigError

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class NoTokenEstimateWarning(RuntimeWarning):
    """Records have no token estimate, so the token budget limits nothing."""


@dataclass
class Prompt:
    """A text for a language model, with a rough idea of its length."""

    text: str

    def estimate_tokens(self) -> int:
        """About one token for every four characters of English text."""
        return len(self.text) // 4 + 1


class TokenBatcher(DynamicBatcher[RecordT, ResultT]):
    """Collects prompts from many callers into batches of a limited number of tokens.

    Args:
        inference_fn: `process_fn` by another name.
        token_estimator: `cost_estimator` by another name. Without either, a record's `estimate_tokens()` counts, then
            its `estimate_cost()`, then `default_token_estimate`.
        target_batch_tokens: `target_batch_cost` by another name.
        default_token_estimate: `default_cost` by another name.
        **options: Everything else `DynamicBatcher` takes.
    """

    def __init__(  # noqa: PLR0913  # the drop-in's constructor, all but one of them keyword-only
        self,
        inference_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        *,
        process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        token_estimator: TokenEstimatorFn | None = None,
        cost_estimator: TokenEstimatorFn | None = None,
        target_batch_tokens: float | None = None,
        target_batch_cost: float = 32_000,
        default_token_estimate: float | None = None,
        default_cost: float = 1,
        **options: Any,
    ) -> None:
        process = inference_fn if inference_fn is not None else process_fn
        if process is None:
            raise TypeError("TokenBatcher requires either 'inference_fn' or 'process_fn'")
        if inference_fn is not None and process_fn is not None:
            raise ConfigError("inference_fn and process_fn are two names of one thing: pass one of them")
        if target_batch_tokens is not None:
            target_batch_cost = number("target_batch_tokens", target_batch_tokens, above=0)
        default = default_cost
        if default_token_estimate is not None:
            default = number("default_token_estimate", default_token_estimate, minimum=0)
        function("token_estimator", token_estimator, needed=False, plain=True)
        estimator = token_estimator if token_estimator is not None else cost_estimator
        super().__init__(
            process,
            cost_estimator=estimator,
            target_batch_cost=target_batch_cost,
            default_cost=default,
            **options,
        )
        warn = self._warn if default_token_estimate is None and default_cost == 1 else None
        self._cost = CostRule(estimator, ("estimate_tokens", "estimate_cost"), default, warn)
        self._warned = False

    async def submit(
        self,
        record: RecordT,
        *,
        estimated_tokens: float | None = None,
        estimated_cost: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        caller: Hashable = None,
    ) -> asyncio.Future[ResultT]:
        """`DynamicBatcher.submit`, with the cost in tokens: `estimated_tokens` before `estimated_cost`."""
        return await super().submit(
            record,
            estimated_cost=estimated_cost if estimated_tokens is None else estimated_tokens,
            priority=priority,
            deadline_s=deadline_s,
            caller=caller,
        )

    def _warn(self, record: Any) -> None:
        if self._warned:
            return
        self._warned = True
        limits = self._options.limits
        warnings.warn(
            f"{type(record).__name__} records have no token estimate: each counts as {self._cost.default} and "
            f"target_batch_tokens={limits.target_batch_cost} limits nothing. Pass token_estimator, estimated_tokens at "
            "submit, or records with an estimate_tokens() method such as headrace.Prompt",
            NoTokenEstimateWarning,
            stacklevel=5,
        )
