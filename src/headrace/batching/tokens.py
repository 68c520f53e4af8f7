"""`TokenBatcher`: a `DynamicBatcher` whose cost is counted in tokens."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from headrace.batching.dynamic import DynamicBatcher
from headrace.batching.options import function, number
from headrace.batching.policy.cost import CostRule, TokenEstimatorFn
from headrace.errors import ConfigError
from headrace.events import Listener

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
AnyT = TypeVar("AnyT")

_DEFAULT_BUDGET = 32_000


class NoTokenEstimateWarning(RuntimeWarning):
    """Records have no token estimate, so the token budget limits nothing."""


@dataclass
class Prompt:
    """A text for a language model, with an estimate of its length."""

    text: str

    def estimate_tokens(self) -> int:
        """About one token for every four characters of English text."""
        return len(self.text) // 4 + 1


class TokenBatcher(DynamicBatcher[RecordT, ResultT]):
    """Collects prompts from many callers into batches with a token budget.

    Args:
        inference_fn: alias of `process_fn`.
        token_estimator: alias of `cost_estimator`. Without either, a record's `estimate_tokens()` is used, then
            its `estimate_cost()`, then `default_token_estimate`.
        target_batch_tokens: alias of `target_batch_cost`; 32,000 by default.
        default_token_estimate: alias of `default_cost`; takes precedence if both are given.

    The others are the same as `DynamicBatcher`'s.

    Raises:
        ConfigError: a parameter is out of range, or given under both of its names.
        TypeError: neither `inference_fn` nor `process_fn` is given.
    """

    def __init__(  # noqa: PLR0913  # the drop-in's constructor, all but one of them keyword-only
        self,
        inference_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        *,
        process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        token_estimator: TokenEstimatorFn | None = None,
        cost_estimator: TokenEstimatorFn | None = None,
        target_batch_tokens: float | None = None,
        target_batch_cost: float = _DEFAULT_BUDGET,
        default_token_estimate: float | None = None,
        default_cost: float = 1,
        max_batch_size: int = 256,
        min_batch_size: int = 1,
        batch_timeout_s: float = 0.05,
        max_queue_size: int = 5_000,
        prefetch_batches: int = 2,
        padded: bool = False,
        length_bucketing: bool | int = False,
        max_queue_cost: float | None = None,
        max_concurrent_batches: int = 1,
        on_error: Literal["fail", "isolate"] = "fail",
        oversized: Literal["alone", "reject"] = "alone",
        process_timeout_s: float | None = None,
        offload: bool = False,
        listener: Listener | None = None,
    ) -> None:
        process = _only_one("inference_fn", inference_fn, "process_fn", process_fn)
        if process is None:
            raise TypeError("TokenBatcher requires either 'inference_fn' or 'process_fn'")
        other_budget = None if target_batch_cost == _DEFAULT_BUDGET else target_batch_cost
        _only_one("target_batch_tokens", target_batch_tokens, "target_batch_cost", other_budget)
        if target_batch_tokens is not None:
            target_batch_cost = number("target_batch_tokens", target_batch_tokens, above=0)
        estimator = _only_one("token_estimator", token_estimator, "cost_estimator", cost_estimator)
        function("token_estimator", token_estimator, needed=False, plain=True)
        function("cost_estimator", cost_estimator, needed=False, plain=True)
        default = number("default_cost", default_cost, minimum=0)
        if default_token_estimate is not None:
            default = number("default_token_estimate", default_token_estimate, minimum=0)
        warn = _WarnOnce(default, target_batch_cost) if default_token_estimate is None and default_cost == 1 else None
        super().__init__(
            process,
            cost_estimator=CostRule(estimator, ("estimate_tokens", "estimate_cost"), default, warn),
            target_batch_cost=target_batch_cost,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            batch_timeout_s=batch_timeout_s,
            max_queue_size=max_queue_size,
            prefetch_batches=prefetch_batches,
            padded=padded,
            length_bucketing=length_bucketing,
            max_queue_cost=max_queue_cost,
            max_concurrent_batches=max_concurrent_batches,
            on_error=on_error,
            oversized=oversized,
            process_timeout_s=process_timeout_s,
            offload=offload,
            listener=listener,
        )

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
        """`DynamicBatcher.submit` with the cost in tokens; `estimated_tokens` overrides `estimated_cost`."""
        return await super().submit(
            record,
            estimated_cost=estimated_cost if estimated_tokens is None else estimated_tokens,
            priority=priority,
            deadline_s=deadline_s,
            caller=caller,
        )


def _only_one(name: str, value: AnyT | None, twin: str, other: AnyT | None) -> AnyT | None:
    """Whichever of two aliases is given."""
    if value is not None and other is not None:
        raise ConfigError(f"{name} and {twin} are aliases: pass only one of them")
    return other if value is None else value


class _WarnOnce:
    """Warns once that records have no token estimate."""

    def __init__(self, default: float, budget: float) -> None:
        self._text = f"each counts as {default} and target_batch_tokens={budget} limits nothing"
        self._warned = False

    def __call__(self, record: object) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{type(record).__name__} records have no token estimate: {self._text}. Pass token_estimator, "
            "estimated_tokens at submit, or records with an estimate_tokens() method such as headrace.Prompt",
            NoTokenEstimateWarning,
            stacklevel=5,
        )
