"""How a wait ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace.errors import DeadlineExceededError
from headrace.serving.admission.waiting import WATCH_AFTER_S, CancelScope
from headrace.serving.errors import ClientGoneError


class Client:
    """Leaves after some seconds; never, if that is None."""

    def __init__(self, leaves_after: float | None = None) -> None:
        self._leaves_after = leaves_after
        self.asked = 0

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        await asyncio.sleep(1e9 if self._leaves_after is None else self._leaves_after)
        return {"type": "http.disconnect"}


def test_results_come_in_order_and_nobody_asked_for_the_client(virtual: VirtualTime) -> None:
    client = Client()

    async def main() -> list[int]:
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        futures[1].set_result(2)
        asyncio.get_running_loop().call_later(WATCH_AFTER_S / 2, futures[0].set_result, 1)
        return await CancelScope(client, 10).all(futures)

    assert virtual(main()) == [1, 2]
    assert client.asked == 0


@pytest.mark.parametrize(
    ("leaves_after", "error", "at"), [(None, DeadlineExceededError, 10), (3, ClientGoneError, 3 + WATCH_AFTER_S)]
)
def test_a_wait_ends_with_its_time_or_its_client(
    virtual: VirtualTime, leaves_after: float | None, error: type[Exception], at: float
) -> None:
    async def main() -> list[bool]:
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        with pytest.raises(error):
            await CancelScope(Client(leaves_after), 10).all(futures)
        assert now() == pytest.approx(at)
        return [future.cancelled() for future in futures]

    assert virtual(main()) == [True, True]


def test_the_first_error_ends_it_for_all(virtual: VirtualTime) -> None:
    async def main() -> bool:
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        futures[0].set_exception(ValueError("bad"))
        futures[1].set_exception(ValueError("worse"))
        with pytest.raises(ValueError, match="bad"):
            await CancelScope(Client(), 10).all(futures)
        return futures[2].cancelled()

    assert virtual(main())


def test_time_that_is_up_before_there_is_anything_to_wait_for_counts_too(virtual: VirtualTime) -> None:
    async def main() -> None:
        wait = CancelScope(Client(), 1)
        await asyncio.sleep(2)
        with pytest.raises(DeadlineExceededError):
            await wait.all([asyncio.get_running_loop().create_future()])

    virtual(main())
