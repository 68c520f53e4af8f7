"""A request that is cancelled while it waits for its model, and a model that is loaded too late."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import ModelPool
from headrace.serving.app import create_app
from headrace.serving.counted import ServiceCounts
from headrace.serving.pooled import ModelRouter


async def connected() -> Any:
    await asyncio.Event().wait()


def test_a_request_that_is_cancelled_when_it_gets_its_model_gives_it_back() -> None:
    requests: list[asyncio.Task[Any]] = []

    async def load() -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(requests[0].cancel))  # once the waiting task has the model
        return "it"

    async def main() -> None:
        pool = ModelPool(max_models=1)
        pool.add("it", load)
        async with pool:
            router = ModelRouter(pool, [], SimpleNamespace())  # type: ignore[arg-type]
            requests.append(asyncio.create_task(router._entered(pool.use("it"), "it", connected, 300.0)))
            [ended] = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError)
            assert (pool.stats()["it"].requests, pool.stats()["it"].in_use) == (1, 0)

    asyncio.run(main())


def test_a_model_whose_loading_ends_too_late_is_closed() -> None:
    loads, closed = threading.Event(), threading.Event()

    def load() -> Any:
        assert loads.wait(60)
        return SimpleNamespace(engine=SimpleNamespace(close=closed.set))

    async def main() -> None:
        app = create_app(SimpleNamespace(observed=None), load, "embed", version="0")  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), app.router.lifespan_context(app):
                raise AssertionError("it was not loaded")
        loads.set()
        await asyncio.to_thread(closed.wait, 60)

    asyncio.run(main())
    assert closed.is_set()


def test_what_ends_while_the_server_drains_is_counted() -> None:
    """A closed engine has no figures any more."""

    class Draining:
        answered = 3

        async def start(self) -> None:
            self.open = True

        @property
        def counted(self) -> ServiceCounts:
            assert self.open
            return ServiceCounts(refused=self.answered)

        async def end_batches(self, _: float) -> None:
            self.answered = 5

        async def stop(self, _: float) -> None:
            self.open = False

    async def main() -> None:
        limits = SimpleNamespace(drain_s=1.0)
        state: Any = SimpleNamespace(observed=None, ended=ServiceCounts(refused=2), limits=limits, tracing=None)
        load: Any = Draining
        app = create_app(state, load, "embed", version="0")
        async with app.router.lifespan_context(app):
            assert state.loaded.counted.refused == 3
        assert state.loaded is None and state.ended.refused == 2 + 5

    asyncio.run(main())
