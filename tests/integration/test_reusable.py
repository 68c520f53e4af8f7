"""One model for a process: loaded once, dropped when idle, whoever calls."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace import DynamicBatcher, reusable
from headrace.concurrency.reusable import Reusable
from headrace.errors import ConfigError

LOADS: list[int] = []
caller = contextvars.ContextVar("caller", default="nobody")


class Model:
    """Counts its calls; each answer says how large its batch was."""

    def __init__(self) -> None:
        self.loads = 0
        self.closed = threading.Event()
        self.batches: list[int] = []
        self.seen: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def load(self) -> DynamicBatcher[int, int]:
        self.loads += 1
        return DynamicBatcher(self.double, max_batch_size=64)

    def yielded(self) -> Iterator[DynamicBatcher[int, int]]:
        try:
            yield self.load()
        finally:
            self.closed.set()

    def double(self, batch: list[int]) -> list[int]:
        self.gate.wait(60)
        self.seen.add(caller.get())
        self.batches.append(len(batch))
        return [2 * number for number in batch]


@reusable
def everywhere() -> DynamicBatcher[int, int]:
    """Of this module, as tasks use it."""
    LOADS.append(os.getpid())
    return DynamicBatcher(lambda batch: [number + 1 for number in batch])


@pytest.fixture
def model() -> Model:
    return Model()


def test_it_is_loaded_once_for_all_threads_and_loops_and_their_calls_share_batches(model: Model) -> None:
    it: Reusable[int, int] = reusable(model.load)
    model.gate.clear()

    async def many(start: int) -> list[int]:
        calls = [asyncio.ensure_future(it(number)) for number in range(start, start + 20)]
        await asyncio.sleep(0)
        if start == 40:
            threading.Timer(0.05, model.gate.set).start()
        return await asyncio.gather(*calls)

    with ThreadPoolExecutor(8) as pool:
        loops = [pool.submit(lambda s=start: asyncio.run(many(s))) for start in (0, 20, 40)]
        threads = [pool.submit(it.blocking, number) for number in range(60, 64)]
        answers = [answer for loop in loops for answer in loop.result(60)] + [thread.result(60) for thread in threads]
    assert answers == [2 * number for number in range(64)]
    assert model.loads == 1
    assert it.stats.total_completed == 64
    assert len(model.batches) < 16
    it.close()


def test_many_records_come_back_in_order(model: Model) -> None:
    it: Reusable[int, int] = reusable(model.load)
    assert asyncio.run(it.map(range(300))) == [2 * number for number in range(300)]
    assert max(model.batches) == 64
    it.close()


def test_what_is_idle_is_dropped_and_loaded_anew_when_called(model: Model) -> None:
    it: Reusable[int, int] = reusable(idle_timeout_s=0.02)(model.yielded)
    assert it.blocking(1) == 2
    assert model.closed.wait(60)
    assert not it.is_loaded
    model.closed.clear()
    assert it.blocking(2) == 4
    assert model.loads == 2
    assert it.stats.total_completed == 2  # those of the first one are not forgotten
    it.close()
    assert model.closed.is_set()


def test_what_is_in_use_is_not_idle(model: Model) -> None:
    it: Reusable[int, int] = reusable(idle_timeout_s=0.01)(model.yielded)
    model.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(it.blocking, 3)
        assert not model.closed.wait(0.1)  # ten times as long as it would take
        model.gate.set()
        assert answer.result(60) == 6
    assert model.closed.wait(60)


def test_closing_answers_what_waits(model: Model) -> None:
    it: Reusable[int, int] = reusable(model.yielded)
    model.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(it.blocking, 1)
        while not it.stats.in_flight:
            pass
        closing = pool.submit(it.close)
        model.gate.set()
        assert first.result(60) == 2
        closing.result(60)
    assert model.closed.is_set()
    it.close()


def test_who_waits_for_a_model_that_cannot_be_loaded_hears_why_and_the_next_call_tries_anew(model: Model) -> None:
    broken = [True]

    def load() -> DynamicBatcher[int, int]:
        if broken.pop() if broken else False:
            raise OSError("no such weights")
        return model.load()

    it: Reusable[int, int] = reusable(load)

    async def calls() -> list[Any]:
        return await asyncio.gather(*(it(number) for number in range(3)), return_exceptions=True)

    errors = asyncio.run(calls())
    assert [str(error) for error in errors] == ["no such weights"] * 3
    assert len({id(error) for error in errors}) == 3
    assert it.blocking(4) == 8
    it.close()


def test_one_who_leaves_while_it_loads_takes_it_from_nobody(model: Model) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load() -> DynamicBatcher[int, int]:
        loading.set()
        go_on.wait(60)
        return model.load()

    it: Reusable[int, int] = reusable(load)

    async def main() -> int:
        impatient, patient = asyncio.create_task(it(1)), asyncio.create_task(it(2))
        await asyncio.to_thread(loading.wait, 30)
        impatient.cancel()
        await asyncio.wait({impatient})
        assert impatient.cancelled()
        go_on.set()
        return await patient

    assert asyncio.run(main()) == 4
    assert model.loads == 1
    it.close()


def test_the_model_sees_no_caller_s_context(model: Model) -> None:
    it: Reusable[int, int] = reusable(model.load)
    caller.set("the first")
    try:
        it.blocking(1)
    finally:
        caller.set("nobody")
    assert model.seen == {"nobody"}
    it.close()


def test_an_async_function_may_load_it(model: Model) -> None:
    async def load() -> DynamicBatcher[int, int]:
        await asyncio.sleep(0)
        batcher = model.load()
        await batcher.start()  # as the drop-in's users write it
        return batcher

    it: Reusable[int, int] = reusable(load)
    assert it.blocking(5) == 10
    it.close()


def test_an_async_generator_may_load_it_and_clean_up(model: Model) -> None:
    async def load() -> AsyncIterator[DynamicBatcher[int, int]]:
        async with model.load() as batcher:
            yield batcher
        model.closed.set()

    it: Reusable[int, int] = reusable(load)
    assert it.blocking(5) == 10
    it.close()
    assert model.closed.is_set()


def test_what_is_no_batcher_is_named() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1

    for wrong, named in ((lambda: 5, "returned 5"), (items, "must return or yield a batcher")):
        with pytest.raises(ConfigError, match=named):
            reusable(wrong).blocking(1)
    with pytest.raises(ConfigError, match="idle_timeout_s"):
        reusable(idle_timeout_s=0)(Model().load)
    with pytest.raises(ConfigError, match="must be a function"):
        reusable("model")  # type: ignore[call-overload]


def test_blocking_on_an_event_loop_is_refused(model: Model) -> None:
    it: Reusable[int, int] = reusable(model.load)

    async def main() -> None:
        it.blocking(1)

    with pytest.raises(ConfigError, match="await the call"):
        asyncio.run(main())


def test_sent_to_where_it_is_known_it_is_the_same() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    local: Reusable[int, int] = reusable(lambda: DynamicBatcher(abs))
    sent = cloudpickle.dumps(local)
    assert pickle.loads(sent) is pickle.loads(sent) is local


def test_a_forked_child_loads_its_own() -> None:
    LOADS.clear()
    assert everywhere.blocking(1) == 2
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = os.fork()
    if not child:
        queue.put((everywhere.blocking(10, timeout=60), len(set(LOADS))))
        os._exit(0)
    os.waitpid(child, 0)
    assert queue.get() == (11, 2)
    everywhere.close()


def test_a_script_that_ends_closes_it() -> None:
    code = (
        "import headrace\n"
        "@headrace.reusable\n"
        "def it():\n"
        "    yield headrace.DynamicBatcher(lambda batch: batch)\n"
        "    print('closed')\n"
        "print(it.blocking(7))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    assert ended.stdout == "7\nclosed\n"
