"""`TokenBatcher`: a `DynamicBatcher` whose cost is counted in tokens."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar, Unpack

from headrace.batching.dynamic import BatcherOptions, DynamicBatcher
from headrace.batching.options import function, number
from headrace.batching.policy.cost import CostRule, TokenEstimatorFn
from headrace.errors import ConfigError, nearest

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
        TypeError: neither `inference_fn` nor `process_fn` is given, or there is no parameter of a name.
    """

    def __init__(
        self,
        inference_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        *,
        process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]] | None = None,
        token_estimator: TokenEstimatorFn | None = None,
        target_batch_tokens: float | None = None,
        default_token_estimate: float | None = None,
        **options: Unpack[BatcherOptions],
    ) -> None:
        if unknown := next((name for name in options if name not in BatcherOptions.__annotations__), None):
            hint = nearest(unknown, (*TokenBatcher.__init__.__annotations__, *BatcherOptions.__annotations__))
            raise TypeError(f"TokenBatcher has no parameter {unknown!r}{hint}")
        process = _only_one("inference_fn", inference_fn, "process_fn", process_fn)
        if process is None:
            raise TypeError("TokenBatcher requires either 'inference_fn' or 'process_fn'")
        budget = options.get("target_batch_cost", _DEFAULT_BUDGET)
        given = None if budget == _DEFAULT_BUDGET else budget
        _only_one("target_batch_tokens", target_batch_tokens, "target_batch_cost", given)
        if target_batch_tokens is not None:
            budget = number("target_batch_tokens", target_batch_tokens, above=0)
        other = options.get("cost_estimator")
        estimator = _only_one("token_estimator", token_estimator, "cost_estimator", other)
        function("token_estimator", token_estimator, needed=False, plain=True)
        function("cost_estimator", other, needed=False, plain=True)
        default = number("default_cost", options.pop("default_cost", 1), minimum=0)
        warn = _WarnOnce(default, budget) if default_token_estimate is None and default == 1 else None
        if default_token_estimate is not None:
            default = number("default_token_estimate", default_token_estimate, minimum=0)
        options["cost_estimator"] = CostRule(estimator, ("estimate_tokens", "estimate_cost"), default, warn)
        options["target_batch_cost"] = budget
        super().__init__(process, **options)

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
    if value is not None and other is not None:
        raise ConfigError(f"{name} and {twin} are aliases: pass only one of them")
    return other if value is None else value


class _WarnOnce:
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
