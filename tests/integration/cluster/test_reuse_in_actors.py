"""`@reusable` inside asynchronous Ray actors: one model and one batcher for each process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it"),
]


def test_an_actor_s_concurrent_calls_share_one_batcher_that_is_loaded_once(tmp_path: Path) -> None:
    import ray

    class Actor:
        async def lengths(self, texts: list[str]) -> Any:
            from tests.integration.cluster import engines

            return await engines.shared.map(texts)

    loads = tmp_path / "loads.txt"
    environment = {"env_vars": {"HEADRACE_TEST_LOADS": str(loads)}}
    remote = ray.remote(num_cpus=0.5, max_concurrency=8, runtime_env=environment)(Actor)
    actors = [remote.remote() for _ in range(2)]
    chunks = [["a" * (n + 1), "b"] for n in range(8)]
    answers = ray.get([actor.lengths.remote(chunk) for actor in actors for chunk in chunks])
    assert [[length for length, _ in answer] for answer in answers] == [[n + 1, 1] for n in range(8)] * 2
    assert len(set(loads.read_text().split())) == len(loads.read_text().split()) == 2
    assert max(size for answer in answers for _, size in answer) > 2, "calls did not share a batch"
    for actor in actors:
        ray.kill(actor)


def test_several_models_of_an_actor_share_its_memory() -> None:
    import ray

    class Actor:
        async def measured(self, texts: list[str]) -> Any:
            from tests.integration.cluster import engines

            return [await engines.first.map(texts), await engines.second.map(texts)]

    actor = ray.remote(num_cpus=0.5, max_concurrency=8)(Actor).remote()
    answers = ray.get([actor.measured.remote(["a" * (n + 1)]) for n in range(8)])
    assert answers == [[[("first", n + 1, 1)], [("second", n + 1, 1)]] for n in range(8)]
    ray.kill(actor)
