"""What a user may write: no type checker finds anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import headrace
from headrace.engines.choosing.config import EngineConfig


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def own(model: str | None = None, its_flag: int = 0) -> Any:
    return lengths


@headrace.batched(max_batch_size=64, batch_timeout_s=0.01)
def measure(texts: list[str]) -> list[int]:
    return lengths(texts)


@headrace.reusable(idle_timeout_s=300)
def shared() -> headrace.DynamicBatcher[str, int]:
    return headrace.DynamicBatcher(lengths, target_batch_cost=100.0, length_bucketing=True)


@headrace.reusable
async def loaded() -> headrace.TokenBatcher[str, int]:
    return headrace.TokenBatcher(lengths)


@headrace.reusable(idle_timeout_s=None)
def cleaned() -> Iterator[headrace.DynamicBatcher[str, int]]:
    yield headrace.DynamicBatcher(lengths)


async def fetch(url: str) -> bytes:
    return url.encode()


async def main() -> Sequence[bytes]:
    batcher = headrace.TokenBatcher[str, int](lengths, target_batch_tokens=8_000, on_error="isolate")
    one: int = await measure("a text")
    async with batcher:
        future = await batcher.submit("a text", estimated_tokens=2)
        total: int = one + await future + await shared("a text", priority=1)
    total += await loaded("a text") + cleaned.blocking("a text", timeout=3)
    pages: list[bytes] = await headrace.map_concurrent(fetch, ["a"] * total, concurrency=20, retries=2)
    return pages


def jobs() -> None:
    headrace.run("in.jsonl", sink="out.jsonl", task="embed", batch_size=32, truncate_dim=64, device="cpu")
    headrace.run(["a"], sink=print, task="generate", engine="vllm", tensor_parallel_size=2, temperature=0.5)
    headrace.run(["a"], sink=print, engine=own, engine_options={"its_flag": 3})
    found: list[dict[str, Any]] = headrace.run(["a"], sink="list", engine=own, progress=False)
    found[0].clear()
    headrace.build_app("zero-shot", "my-model", labels=["sports", "politics"], batch_tokens=4_096)
    headrace.build_app(engine="own:make", engine_options={"its_flag": 3}, engine_timeout_s=5)
    EngineConfig(task="embed", engine_options={"max_model_len": 128})
    embedding = headrace.Embedding(model="my-model", dtype="float32")
    headrace.run("in.jsonl", sink="out.jsonl", engine=embedding, limits=headrace.Limits(max_errors=3))
    headrace.run("in.jsonl", sink="out.jsonl", max_errors=3, sample=0.5, progress=False)
    headrace.build_app(engine=embedding, limits=headrace.ServeLimits(max_requests=9), max_wait_s=3)
