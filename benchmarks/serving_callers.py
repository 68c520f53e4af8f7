"""Callers with ordinary batches, in their own process, with OpenAI's client at its defaults.

`python -m benchmarks.serving_callers PORT GROUP` makes a group's clients and texts, prints `ready`, and asks once it
reads a line. A group is CALLERSxTEXTSxWORDS, or `singles`: 200 single texts of 20 words, 50 a second. It prints JSON:
the group's answers, what was lost, and the latencies (sorted, seconds).

`python -m benchmarks.serving_callers PORT obey SECONDS` sends so many seconds of work, of a server that was measured
before, in 40 requests at once, and obeys Retry-After: how many were refused, and how many of those were answered at
their second attempt. `python -m benchmarks.serving_callers PORT bodies COUNT BYTES` sends so many bodies at once.
`python -m benchmarks.serving_callers PORT idle COUNT SECONDS` asks on so many connections of httpx, twice, and again
after each pause from 4.8 to SECONDS seconds: how many requests were lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx
from openai import AsyncOpenAI

from benchmarks.serving import PATH

_WORDS = "a canal feeds the mill whose wheel turns while water flows past locks and weirs to ponds".split()  # noqa: SIM905


def text(words: int, chance: random.Random) -> str:
    """A text of so many words."""
    return " ".join(chance.choice(_WORDS) for _ in range(words))


async def _group(url: str, group: str) -> dict[str, Any]:
    latencies: list[float] = []
    lost: Counter[str] = Counter()

    async def ask(client: AsyncOpenAI, given: list[str], after_s: float) -> None:
        await asyncio.sleep(after_s)
        began = time.monotonic()
        try:
            await client.embeddings.create(model="all-MiniLM-L6-v2", input=given)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
            lost[type(error).__name__] += 1
        else:
            latencies.append(time.monotonic() - began)

    chance = random.Random(group)
    singles = group == "singles"
    callers, texts, words = (200, 1, 20) if singles else map(int, group.split("x"))
    clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for _ in range(1 if singles else callers)]
    inputs = [[text(words, chance) for _ in range(texts)] for _ in range(callers)]
    gap_s = 0.02 if singles else 0.0
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(
        *(ask(clients[number % len(clients)], given, number * gap_s) for number, given in enumerate(inputs))
    )
    return {"answered": len(latencies), "lost": lost, "latencies_s": sorted(latencies)}


async def _obey(url: str, seconds: str) -> dict[str, Any]:
    chance = random.Random(1)
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        body = {"input": [text(30, chance) for _ in range(1_000)]}
        began = time.monotonic()
        (await client.post(url + PATH, json=body)).raise_for_status()
        texts = int(1_000 / (time.monotonic() - began) * float(seconds) / 40)
        bodies = [{"input": [text(30, chance) for _ in range(min(texts, 2_048))]} for _ in range(40)]

        async def attempts(body: dict[str, Any]) -> int:
            count = 1
            while (answer := await client.post(url + PATH, json=body)).status_code == 429:
                await asyncio.sleep(int(answer.headers["retry-after"]))
                count += 1
            answer.raise_for_status()
            return count

        counts = Counter(await asyncio.gather(*map(attempts, bodies)))
    return {"refused": 40 - counts[1], "second": counts[2], "attempts": counts}


async def _bodies(url: str, count: str, size: str) -> dict[str, Any]:
    content = json.dumps({"input": ["word " * 40_000] * (int(size) // 200_010)}).encode()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def ask() -> str:
            try:
                answer = await client.post(url + PATH, content=content, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                return type(error).__name__
            return str(answer.status_code)

        return {"statuses": Counter(await asyncio.gather(*(ask() for _ in range(int(count)))))}


async def _idle(url: str, count: str, seconds: str) -> dict[str, Any]:
    lost: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=int(count), max_keepalive_connections=int(count))
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def ask() -> None:
            try:
                (await client.post(url + PATH, json={"input": "a mill"})).raise_for_status()
            except httpx.HTTPError as error:
                lost[type(error).__name__] += 1

        for pause in (0.0, 0.0, 4.8, 4.9, 4.95, 5.0, float(seconds)):
            await asyncio.sleep(pause)
            await asyncio.gather(*(ask() for _ in range(int(count))))
    return {"lost": lost}


async def main() -> None:
    """Ask, then print."""
    port, *given = sys.argv[1:]
    url = f"http://127.0.0.1:{port}"
    known = {"obey": _obey, "bodies": _bodies, "idle": _idle}
    if given[0] in known:
        print(json.dumps(await known[given[0]](url, *given[1:])))  # type: ignore[operator]
    else:
        print(json.dumps({given[0]: await _group(url, given[0])}))


if __name__ == "__main__":
    asyncio.run(main())
