"""Code that runs in Ray Serve's own processes. It is sent by value, so it imports only Ray."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import BackPressureError, RayServeException

logger = logging.getLogger("ray.serve")

COST = "queued_cost"
"""Name of the autoscaling metric of a replica."""
WAKE = "wake"
"""Name of the replica's no-op method."""


class QueuedCost:
    """An autoscaling policy that keeps the average cost in progress per replica at `target`."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, object]]:
        costs = (context.aggregated_metrics or {}).get(COST, {})
        wanted = sum(costs.values()) / self._target
        # Without replicas there is no cost metric yet, only the number of requests.
        return max(wanted, min(context.total_num_requests, 1.0)), {}


class ColdError(BackPressureError):  # type: ignore[misc] # Ray is untyped
    """No replica is loaded: 503 with Retry-After."""

    def __init__(self, retry_after_s: float, body: str) -> None:
        super().__init__(0, 0, 503, retry_after_s)
        self._body = body

    @property
    def message(self) -> str:
        return self._body


class RefusesWhenCold(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc] # Ray is untyped
    """Ray Serve's default router, but it refuses requests while no replica is loaded.

    Ray Serve starts a replica only for waiting requests, so one no-op call waits on behalf of the refused requests.
    """

    def initialize_state(self, name: str, retry_after_s: float, body: str) -> None:
        """Called by Ray Serve with the arguments that `application` sets. `name` is the application."""
        self._name = name
        self._retry_after_s = retry_after_s
        self._body = body
        self._waking: asyncio.Task[None] | None = None

    async def _choose_replica_for_request(self, pending: Any, *, is_retry: bool = False) -> object:
        # A private method: Ray Serve calls the public `choose_replicas` only if replicas exist.
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
            logger.warning("cannot start a replica of %s: %s", self._name, error)
