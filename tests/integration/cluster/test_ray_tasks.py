"""`map_concurrent` over tasks of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import until

from headrace import map_concurrent
from headrace.errors import ConfigError, WorkerDiedError

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it"),
]


async def there(file: Path) -> None:
    await asyncio.to_thread(until, file.exists, 600)


def test_each_call_is_a_task_elsewhere_and_errors_are_the_function_s_own() -> None:
    from headrace.cluster.ray.tasks import ray_task

    def inverse(number: int) -> tuple[float, int]:
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1 / number, os.getpid()

    results = list(map_concurrent(ray_task(inverse, num_cpus=0.5), [1, 2, 0, 4, 5], return_exceptions=True))
    assert [results[index][0] for index in (0, 1, 4)] == [1.0, 0.5, 0.2]
    assert results[0][1] != os.getpid()
    assert isinstance(results[2], ZeroDivisionError)
    assert isinstance(results[3], WorkerDiedError)


def test_a_cancelled_call_is_cancelled_on_the_cluster(tmp_path: Path) -> None:
    from headrace.cluster.ray.tasks import ray_task

    def waits(name: str) -> None:
        try:
            (tmp_path / f"{name} began").touch()  # here already: the interrupt may come as soon as this is seen
            while True:
                time.sleep(0.05)  # a long one would go on: Ray interrupts between two instructions
        except KeyboardInterrupt:
            (tmp_path / f"{name} ended").touch()
            raise

    async def main() -> None:
        calls = asyncio.ensure_future(map_concurrent(ray_task(waits, num_cpus=0.5), ["one"])._collect())
        await there(tmp_path / "one began")
        calls.cancel()
        await asyncio.wait({calls})
        await there(tmp_path / "one ended")

    asyncio.run(main())


def test_a_call_is_cancelled_on_workers_that_ignore_interrupts(tmp_path: Path) -> None:
    """As those of a cluster do that was started in a shell's background."""
    from headrace.cluster.ray.tasks import ray_task

    def waits(name: str) -> None:
        try:
            (tmp_path / f"{name} began").touch()
            while True:
                time.sleep(0.05)
        except KeyboardInterrupt:
            (tmp_path / f"{name} ended").touch()
            raise

    def sigint_ignored(count: int) -> list[int]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(0.5)  # so that each worker gets one
        return [count]

    async def main() -> None:
        await map_concurrent(ray_task(sigint_ignored, num_cpus=0.5), range(8))._collect()
        calls = asyncio.ensure_future(map_concurrent(ray_task(waits, num_cpus=0.5), ["one"])._collect())
        await there(tmp_path / "one began")
        calls.cancel()
        await asyncio.wait({calls})
        await there(tmp_path / "one ended")

    asyncio.run(main())


def test_a_function_that_cannot_be_sent_is_refused_at_once() -> None:
    from headrace.cluster.ray.tasks import ray_task

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to a cluster"):
        ray_task(lambda item: lock)
