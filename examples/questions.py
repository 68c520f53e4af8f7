"""Ask questions, in chunks of 50, of a model on a cluster: with retries, limited concurrency and a batcher per replica.

python examples/questions.py            # Ray Serve, on a cluster on this machine
python examples/questions.py URL        # any server that speaks OpenAI's API

HEADRACE_GSM8K names a file of real questions, a JSON object with "question" and "answer" on each line; the included
model can only do sums, so all of its answers but one are wrong. With QUESTIONS_ENGINE=vllm, vLLM generates.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from headrace import map_concurrent

UNSEEN = Path(__file__).parent / "unseen_sums.jsonl"
REAL = os.environ.get("HEADRACE_GSM8K")
ENGINE = os.environ.get("QUESTIONS_ENGINE")
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 64, "dtype": "float32", "enforce_eager": True}
"""Of vLLM, for a small model on a CPU."""
CHUNK = 50


def fetch(limit: int = 400) -> list[dict[str, str]]:
    """Sums that the arithmetic model has never seen, with their answers; or real questions, as long as it can read."""
    if REAL is None:
        return [json.loads(line) for line in UNSEEN.read_text().splitlines()[:limit]]
    rows = [json.loads(line) for line in Path(REAL).read_text(encoding="utf-8").splitlines()]
    asked = [{"prompt": row["question"], "answer": row["answer"].rpartition("#### ")[2]} for row in rows]
    return [row for row in asked if len(row["prompt"]) < 480][:limit]


def chunks(rows: Sequence[dict[str, str]]) -> list[list[str]]:
    """The prompts, 50 together."""
    prompts = [row["prompt"] for row in rows]
    return [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]


async def ask(url: str, prompts: list[str]) -> list[str]:
    """The answers to one chunk; an error is worth another try."""
    async with httpx.AsyncClient(timeout=120) as client:
        reply = await client.post(f"{url}/v1/completions", json={"prompt": prompts, "max_tokens": 16, "temperature": 0})
    reply.raise_for_status()
    return [choice["text"] for choice in sorted(reply.json()["choices"], key=lambda choice: int(choice["index"]))]


async def answer_all(call: Callable[[list[str]], Any], rows: Sequence[dict[str, str]]) -> str:
    """All answers, eight chunks at a time: how many there are, and how many of them are right."""
    started = time.monotonic()
    answers: list[str] = []
    async for given in map_concurrent(call, chunks(rows), concurrency=8, retries=20):
        answers += given
    right = sum(row["answer"] == answer.strip() for row, answer in zip(rows, answers, strict=True))
    speed = len(rows) / (time.monotonic() - started)
    return f"{len(answers)} answers, {right} of {len(rows)} right, {speed:.0f} answers/s"


def main() -> None:
    """Ask the server at the address given, or one on a local Ray cluster."""
    rows = fetch()
    if sys.argv[1:]:
        print(asyncio.run(answer_all(lambda prompts: ask(sys.argv[1], prompts), rows)))
        return
    from headrace.app.servers.server import ServerSettings
    from headrace.cluster.base import ClusterResources, Replicas
    from headrace.cluster.ray.serving import served
    from headrace.engines.choosing.config import EngineConfig

    options = OPTIONS if ENGINE == "vllm" else {}
    settings = ServerSettings(EngineConfig(task="generate", engine=ENGINE, engine_options=options))
    with served(settings, Replicas(0, 2), ClusterResources(cpus=0.5), "127.0.0.1", 8011) as url:
        print(asyncio.run(answer_all(lambda prompts: ask(url, prompts), rows)))


if __name__ == "__main__":
    main()
