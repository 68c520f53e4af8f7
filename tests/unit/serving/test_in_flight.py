"""The life of a request: what it reserves is released, and what it has submitted is answered or given up."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace.batching.pending import PendingResult
from headrace.engines.base import Prepared
from headrace.engines.choosing.served import ServedModel
from headrace.errors import ProcessError, QueueFullError, StoppedError
from headrace.events import BatchFormed
from headrace.serving.admission.waiting import CancelScope
from headrace.serving.errors import ApiError, ClientGoneError
from headrace.serving.limits import ServeLimits
from headrace.serving.service import Call, RequestInFlight, Service
from headrace.testing import FakeEngine


class Room:
    """A batcher that takes so many records, and answers none by itself."""

    def __init__(self, room: int) -> None:
        self.futures: list[asyncio.Future[Any]] = []
        self.waiting_cost = 0.0
        self._room = room

    async def stop(self, timeout: float | None, *, drain: bool) -> None:
        """Fail what waits."""
        self._room = self.waiting_cost = 0
        for future in self.futures:
            future.set_exception(StoppedError("stopped"))

    def submit_nowait(self, record: Any, **options: Any) -> asyncio.Future[Any]:
        if len(self.futures) == self._room:
            raise QueueFullError("no room")
        self.futures.append(PendingResult(loop=asyncio.get_running_loop()))
        self.futures[-1].holder = None
        self.waiting_cost += options["estimated_cost"]
        return self.futures[-1]


async def receive() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("it never ends")


def service(batcher: Room, engine: FakeEngine | None = None, express: Room | None = None) -> Service:
    return Service(
        ServedModel(("fake",)),
        "embed",
        engine or FakeEngine(max_model_len=2),
        batcher,  # type: ignore[arg-type]
        ServeLimits(),
        lambda: None,
        express,  # type: ignore[arg-type]
    )


def call(*, may_cut: bool = True) -> Call:
    return Call(receive, timeout_s=10, caller="a test", may_cut=may_cut)


def test_whole_answers_are_counted_and_their_room_is_released(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(2)
        served = service(batcher)
        waiting = asyncio.ensure_future(served.infer(["a", "b c d"], 2, call()))
        await asyncio.sleep(0.1)
        assert served.admission.requests == 2
        for number, future in enumerate(batcher.futures):
            future.set_result(number)
        answers = await waiting
        assert (answers.outputs, answers.cost, answers.truncated) == ([0, 1], 3, [1])
        assert (served.admission.requests, served.tokens.prompt) == (0, 3)

    virtual(main())


def test_a_request_without_records_has_no_answers(virtual: VirtualTime) -> None:
    async def main() -> None:
        assert (await service(Room(0)).infer([], 0, call())).outputs == []

    virtual(main())


def test_records_before_one_that_is_refused_are_given_up_with_it(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(2)
        served = service(batcher)
        with pytest.raises(ApiError, match="the server is overloaded") as caught:
            await served.infer(["a", "b", "c"], 3, call())
        assert caught.value.status_code == 429
        assert [future.cancelled() for future in batcher.futures] == [True, True]
        assert served.admission.requests == 0

    virtual(main())


def test_a_text_that_may_not_be_cut_is_refused_before_any_is_submitted(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(2)
        with pytest.raises(ApiError, match="text 1 of input is longer than the model accepts"):
            await service(batcher).infer(["a", "b c d"], 2, call(may_cut=False))
        assert batcher.futures == []

    virtual(main())


def test_a_client_that_has_gone_is_counted_and_its_records_are_given_up(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(2)
        served = service(batcher)

        async def leave() -> None:
            with RequestInFlight(served, ["a", "b"], 2, call()) as request:
                await request.submit()
                raise ClientGoneError("the client closed the connection")

        with pytest.raises(ClientGoneError):
            await leave()
        assert all(future.cancelled() for future in batcher.futures)
        assert (served.cancelled, served.admission.requests, served.tokens.prompt) == (2, 0, 0)

    virtual(main())


@pytest.mark.parametrize(("texts", "words", "most"), [(300, 1, 128), (100, 300, 27), (3, 20_000, 1)])
def test_long_texts_are_prepared_in_small_slices(virtual: VirtualTime, texts: int, words: int, most: int) -> None:
    class Counting(FakeEngine):
        def prepare(self, inputs: Sequence[object]) -> list[Prepared[str] | Exception]:
            slices.append(len(inputs))
            return super().prepare(inputs)

    async def main() -> None:
        served = service(Room(texts))
        served.engine = Counting()
        scope = CancelScope(receive, 10)
        size = max(texts * words, 1_000)
        prepared = [
            entry async for part in served.prepare(["word " * words] * texts, size, call(), scope) for entry in part
        ]
        assert len(prepared) == texts

    slices: list[int] = []
    virtual(main())
    assert (sum(slices), max(slices)) == (texts, most)


def test_a_large_request_is_prepared_only_some_batches_ahead(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(10_000)
        served = service(batcher, FakeEngine(), Room(0))
        ahead = 4 * served.profile.full_cost
        waiting = asyncio.ensure_future(served.infer(["word " * 100] * 400, 40_000, call()))
        await asyncio.sleep(1)
        assert ahead <= batcher.waiting_cost < ahead + 8_192
        small = asyncio.ensure_future(served.infer(["b"], 1, call()))
        await asyncio.sleep(0.1)
        batcher.futures[-1].set_result("b")
        assert (await small).outputs == ["b"]  # it waits for nobody's turn
        submitted = len(batcher.futures)
        batcher.waiting_cost = 0.0  # a batch was formed
        served.heard(BatchFormed(batch=1, size=1, cost=1, padded_cost=1, reason="size", starved_s=0, at=1))
        await asyncio.sleep(0.1)
        assert len(batcher.futures) > submitted
        with pytest.raises(ApiError, match="timed out") as caught:  # while it waits for its turn
            await waiting
        assert caught.value.status_code == 408
        assert all(future.done() for future in batcher.futures)
        assert (served.admission.requests, served.admission.ahead) == (0, batcher.waiting_cost)

    virtual(main())


def test_the_first_error_ends_a_request_before_all_is_prepared(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(10_000)
        served = service(batcher, FakeEngine(), Room(0))
        waiting = asyncio.ensure_future(served.infer(["word " * 100] * 4_000, 400_000, call()))
        await asyncio.sleep(0.1)
        batcher.futures[0].set_exception(ProcessError("broken"))
        batcher.waiting_cost = 0.0
        served.heard(BatchFormed(batch=1, size=1, cost=1, padded_cost=1, reason="size", starved_s=0, at=1))
        with pytest.raises(ApiError, match="the model failed"):
            await waiting
        assert len(batcher.futures) < 1_000
        assert all(future.done() for future in batcher.futures)

    virtual(main())


def test_requests_that_wait_for_a_turn_learn_that_the_batcher_has_stopped(virtual: VirtualTime) -> None:
    async def main() -> None:
        batcher = Room(10_000)
        served = service(batcher, FakeEngine(), Room(0))
        many = [asyncio.ensure_future(served.infer(["word " * 100] * 400, 40_000, call())) for _ in range(3)]
        await asyncio.sleep(0.1)
        began = now()
        await served.end_batches(0.1, drain=False)
        errors = await asyncio.gather(*many, return_exceptions=True)
        assert all(isinstance(error, ApiError) for error in errors)
        assert now() - began < 1

    virtual(main())
