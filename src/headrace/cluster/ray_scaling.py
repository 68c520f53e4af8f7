"""What Ray Serve's own processes run for us. They get it by value, so it needs nothing but Ray."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import BackPressureError, RayServeException

logger = logging.getLogger("ray.serve")

COST = "queued_cost"
"""What a replica calls its own figure."""
WAKE = "wake"
"""A replica's method that does nothing."""


class QueuedCost:
    """An autoscaling policy: so many replicas that each has `target` cost accepted and not yet answered, on average."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """How many there should be; Ray Serve keeps the bounds and the delays."""
        costs = (context.aggregated_metrics or {}).get(COST, {})
        wanted = sum(costs.values()) / self._target
        # What waits for its first replica has told nobody its cost yet.
        return max(wanted, min(context.total_num_requests, 1.0)), {}


class ColdError(BackPressureError):  # type: ignore[misc] # of Ray, which has no types
    """No replica is loaded: 503, and when to come again."""

    def __init__(self, retry_after_s: float, body: str) -> None:
        super().__init__(0, 0, 503, retry_after_s)
        self._body = body

    @property
    def message(self) -> str:
        """The body of the response."""
        return self._body


class RefusesWhenCold(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc] # of Ray, which has no types
    """Ray Serve's own choice of a replica, but a request that finds none is refused rather than kept.

    Ray Serve starts a replica for what waits: one call of our own waits in the stead of all that are refused.
    """

    def initialize_state(self, name: str, retry_after_s: float, body: str) -> None:
        """Ray Serve calls it with what `application` says; the name is the application's and its deployment's."""
        self._name = name
        self._retry_after_s = retry_after_s
        self._body = body
        self._waking: asyncio.Task[None] | None = None

    async def _choose_replica_for_request(self, pending: Any, *, is_retry: bool = False) -> Any:
        # Ray Serve has no hook for this: its public `choose_replicas` is not asked while there is none.
        if not self.curr_replicas and not is_retry and pending.metadata.call_method != WAKE:
            if self._waking is None or self._waking.done():
                self._waking = asyncio.create_task(self._wake())
            raise ColdError(self._retry_after_s, self._body)
        return await super()._choose_replica_for_request(pending, is_retry=is_retry)

    async def _wake(self) -> None:
        handle = await asyncio.to_thread(serve.get_deployment_handle, self._name, self._name)
        try:
            await getattr(handle, WAKE).remote()
        except RayServeException as error:
            logger.warning("no replica of %s could be woken: %s", self._name, error)
