"""A worker tells the job what its engine knows: counts of its prefix cache, and which prompts have one answer."""

from __future__ import annotations

import asyncio

import headrace
from headrace.cluster.remote_job import RemoteEngine
from headrace.cluster.worker import WorkerActor, WorkerInfo, WorkerSpec, unpack
from headrace.cluster.worker_pool import WorkUnitReply
from headrace.engines.base import Placed, Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.events import PrefixCacheUsed


def test_each_reply_has_the_prompt_tokens_since_the_last_and_equal_prompts_are_known() -> None:
    config = EngineConfig(task="embed", engine="tests.integration.cluster.engines:Prefixes")

    async def run() -> tuple[WorkerInfo, list[WorkUnitReply]]:
        worker = WorkerActor(WorkerSpec(config, headrace.__version__))
        info = await worker.load()
        assert isinstance(info, WorkerInfo)
        prepared = [one for one in RemoteEngine(info).prepare(["a b c d", "e f"]) if isinstance(one, Prepared)]
        return info, [unpack(await worker.work([one.payload])) for one in prepared]

    info, replies = asyncio.run(run())
    counts = [
        (event.queries, event.hits, event.computed)
        for reply in replies
        for event in reply.events
        if isinstance(event, PrefixCacheUsed)
    ]
    assert counts == [(4, 2, 2), (2, 1, 1)]
    engine = RemoteEngine(info)
    asked = ["a", {"prompt": "a"}, {"prompt": "a", "temperature": 1}, Placed("a", 3), Placed({"temperature": 2}, 4)]
    found = [one.greedy for one in engine.prepare(asked) if isinstance(one, Prepared)]
    assert found == [True, True, False, True, False]
