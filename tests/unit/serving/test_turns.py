"""Large requests prepare their slices in turns, shared fairly by cost."""

from __future__ import annotations

import asyncio

from tests.unit.virtual_time import VirtualTime

from headrace.batching.policy.waiting_queue import Share
from headrace.serving.admission.turns import PreparationTurns


class Model:
    """What waits for a model."""

    ahead = 0.0

    def turns(self, at_once: int = 1) -> PreparationTurns:
        return PreparationTurns(lambda: self.ahead, 100, at_once, 80)


def test_turns_begin_while_little_waits_for_the_model(virtual: VirtualTime) -> None:
    async def main() -> None:
        model = Model()
        turns = model.turns()
        first, second = turns.ask(60, "a"), turns.ask(60, "b")
        assert (first.done(), second.done()) == (True, False)
        model.ahead = 120
        turns.end(first)
        assert not second.done()
        model.ahead = 99
        turns.proceed()
        assert second.done()

    virtual(main())


def test_callers_and_keys_share_the_turns_by_cost(virtual: VirtualTime) -> None:
    async def main() -> None:
        turns = Model().turns()
        order: list[str] = []

        async def request(caller: str | Share, cost: float, slices: int) -> None:
            for _ in range(slices):
                turn = turns.ask(cost, caller)
                await turn
                order.append(caller if isinstance(caller, str) else str(caller.owner))
                await asyncio.sleep(1)
                turns.end(turn)

        large = [asyncio.ensure_future(request(Share("many", n), 80, 5)) for n in range(8)]
        large += [asyncio.ensure_future(request("one", 80, 5))]
        await asyncio.sleep(3.5)
        await request("small", 10, 1)
        assert order[4:].index("small") < 2, "it waits for no more than it has, and one slice"
        await asyncio.gather(*large)
        assert order[:15].count("one") >= 5, "a key of many callers has one part"
        assert len(order) == 46

    virtual(main())


def test_a_turn_that_is_given_up_passes_to_the_next(virtual: VirtualTime) -> None:
    async def main() -> None:
        turns = Model().turns(at_once=2)
        asked = [turns.ask(1, number) for number in range(5)]
        assert [turn.done() for turn in asked] == [True, True, False, False, False]
        asked[2].cancel()  # its client has gone
        turns.end(asked[2])
        turns.end(asked[3])  # its request was refused before its turn
        turns.end(asked[0])
        assert asked[4].done()
        assert not asked[4].cancelled()

    virtual(main())
