"""Several models of a process that share memory, called from any thread and event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import headrace
from headrace.errors import ConfigError

here: list[str] = []
most: list[int] = []
models = headrace.ReusablePool(max_models=1)


def loaded(name: str) -> Iterator[headrace.DynamicBatcher[str, str]]:
    here.append(name)
    most.append(len(here))
    yield headrace.DynamicBatcher(lambda texts: [f"{name}: {text}" for text in texts])
    here.remove(name)


@models.reusable(max_wait_s=0.02)
def embed() -> Iterator[headrace.DynamicBatcher[str, str]]:
    """The first model."""
    yield from loaded("embed")


@models.reusable(max_wait_s=0.02)
def classify() -> Iterator[headrace.DynamicBatcher[str, str]]:
    yield from loaded("classify")


@models.reusable
def broken() -> headrace.DynamicBatcher[str, str]:
    raise OSError("no weights")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    models.close()
    assert not here


def test_calls_of_all_threads_and_loops_get_their_models_of_which_one_is_loaded() -> None:
    async def both() -> list[str]:
        return await asyncio.gather(*[model(text) for text in "ab" for model in (embed, classify)])

    with ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(asyncio.run, both()) for _ in range(3)]
        threads = [pool.submit(embed.blocking, "c") for _ in range(3)]
        assert [loop.result(60) for loop in loops] == [["embed: a", "classify: a", "embed: b", "classify: b"]] * 3
        assert [thread.result(60) for thread in threads] == ["embed: c"] * 3
    assert asyncio.run(classify.map(["x", "y"])) == ["classify: x", "classify: y"]
    assert max(most) == 1
    assert (embed.stats.total_completed, classify.stats.total_completed) == (9, 8)
    assert (embed.is_loaded, classify.is_loaded) == (False, True)
    assert embed.__doc__ == "The first model."


def test_a_model_that_cannot_be_loaded_fails_alone() -> None:
    with pytest.raises(headrace.errors.EngineError, match=r"broken' cannot be loaded: no weights"):
        broken.blocking("a")
    assert embed.blocking("a") == "embed: a"
    embed.close()
    assert not embed.is_loaded
    assert embed.blocking("b") == "embed: b"


def test_a_caller_that_leaves_gives_its_model_back() -> None:
    embed.blocking("a")

    async def leave() -> None:
        async with asyncio.timeout(0.005):
            await classify("x")

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    assert [stats.in_use for stats in models.stats().values()] == [0] * len(models.stats())
    assert classify.blocking("y") == "classify: y"


def child(answers: multiprocessing.SimpleQueue[str]) -> None:
    answers.put(embed.blocking("child"))


def test_other_processes_have_a_pool_of_their_own() -> None:
    assert pickle.loads(pickle.dumps(embed)) is embed
    assert pickle.loads(pickle.dumps(models)) is models
    embed.blocking("a")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    assert answers.get() == "embed: child"
    process.join(60)


def test_functions_within_functions_are_told_apart() -> None:
    pool, before = headrace.ReusablePool(max_models=2), set(threading.enumerate())

    def make(factor: int) -> headrace.concurrency.reusable.Reusable[int, int]:  # type: ignore[name-defined]
        @pool.reusable
        def model() -> headrace.DynamicBatcher[int, int]:
            return headrace.DynamicBatcher(lambda batch: [factor * one for one in batch])

        return model

    assert [make(factor).blocking(3) for factor in (1, 2)] == [3, 6]
    pool.close()
    assert len(set(threading.enumerate()) - before) < 5


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="either max_models or memory_bytes"):
        headrace.ReusablePool()
    with pytest.raises(ConfigError, match="no option 'idle_s'"):
        models.reusable(idle_s=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="must be a function"):
        models.reusable("model")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="must return or yield a batcher"):
        models.reusable(lambda: 5).blocking(1)  # type: ignore[arg-type]


def test_a_load_that_nobody_waits_for_ends_before_python_does() -> None:
    """Native code that is still running then may abort the process."""
    program = """
import asyncio, threading, time
from headrace.concurrency.daemon_thread import on_daemon_thread

def load():
    started.set()
    time.sleep(0.2)
    print("loaded")

async def main():
    waiting = asyncio.create_task(on_daemon_thread(load))
    await asyncio.to_thread(started.wait)
    waiting.cancel()

started = threading.Event()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert (done.stdout, done.stderr) == ("loaded\n", "")
