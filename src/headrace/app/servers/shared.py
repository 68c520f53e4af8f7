"""A loaded model that serves requests beside its other work, on an event loop that need not be the model's."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import ExitStack

from headrace.app.jobs.running import RunningModel
from headrace.batching.stats import BatchStats
from headrace.engines.base import Engine
from headrace.events import Listener
from headrace.jobs.pipeline.work import Work
from headrace.records import Record


class RequestPort:
    """The batcher of a loaded model as a server uses it, from the server's event loop. It is started and stopped with
    the model, not with the server."""

    def __init__(self, model: RunningModel) -> None:
        self._batcher = model.batcher
        self._open: set[asyncio.Future[object]] = set()

    @property
    def stats(self) -> BatchStats:
        return self._batcher.stats

    @property
    def waiting_cost(self) -> float:
        """Cost of the records that wait for a batch, those of others included."""
        return self._batcher.waiting_cost

    async def start(self) -> None:
        """Do nothing: the model is already running."""

    async def stop(self, timeout: float | None = None, *, drain: bool = True) -> None:
        """Wait for the requests that were submitted; then cancel those that are left."""
        if drain and self._open:
            await asyncio.wait(self._open, timeout=timeout)
        for future in tuple(self._open):
            future.cancel()

    def submit_nowait(
        self,
        payload: object,
        *,
        estimated_cost: float | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        caller: Hashable = None,
    ) -> asyncio.Future[object]:
        """Queue a payload; returns the future of its output, on the running event loop."""
        work = Work(Record(0, None, None), None, payload)
        future = asyncio.wrap_future(
            self._batcher.submit_threadsafe(
                work, estimated_cost=estimated_cost, priority=priority, deadline_s=deadline_s, caller=caller
            )
        )
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    async def submit(self, payload: object, **options: object) -> asyncio.Future[object]:
        """`submit_nowait`: a loaded model has room, or the record waits for it."""
        return self.submit_nowait(payload, **options)  # type: ignore[arg-type]  # the same options


class KeptEngine:
    """The engine of a loaded model, which a server closes without ending it.

    Args:
        model: has the engine.
        listener: receives the events of the model's batches until the server closes.
    """

    def __init__(self, model: RunningModel, listener: Listener) -> None:
        self._engine: Engine = model.engine
        self._heard = ExitStack()
        self._heard.enter_context(model.heard(listener))

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def close(self) -> None:
        self._heard.close()
