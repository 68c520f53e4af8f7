"""Mixed requests to a real server of a small language model: each greedy answer must be the one that it has alone.

python scripts/fuzz_serving.py --requests 20000

Requests are whole, streamed and cancelled, with several choices, log probabilities, stop strings, equal beginnings,
token ids and refused fields, with batches of the Batch API beside them. Everything stays on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.integration.serving.running import running  # noqa: E402

from headrace.app.servers.server import ServerSettings  # noqa: E402
from headrace.engines.choosing.config import EngineConfig  # noqa: E402
from headrace.engines.generation.causal_lm import ARITHMETIC  # noqa: E402
from headrace.serving.limits import ServeLimits  # noqa: E402

SHARED = ["1+2=3; " * 15, "Ada has 3 hats and gets 4 more. How many now? 7. " * 4, "0" * 96]
"""Beginnings that prompts have in common, longer than a page of the cache."""
SURE = 1e-3
"""How far the best token of each step must be ahead, so that rounding decides nothing."""
LONGEST_S = 60.0
"""A request that takes longer has hung."""
BATCH_LINES = 40


@dataclass(frozen=True)
class Ask:
    """A greedy request and its answer alone."""

    body: dict[str, Any]
    ids: list[int]
    text: str
    tokens: int
    reason: str

    @property
    def url(self) -> str:
        """Its route."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


class Alone:
    """Greedy answers of transformers to one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.words = AutoTokenizer.from_pretrained(str(folder))
        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self._end = int(self._model.generation_config.eos_token_id)

    def ask(self, body: dict[str, Any]) -> Ask | None:
        """The request with its answer; None if rounding may decide a token."""
        if "messages" in body:
            text = self.words.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        else:
            text = body["prompt"]
        ids = self.words(text, add_special_tokens=False)["input_ids"]
        made = self._tokens(ids, body["max_tokens"], None if body.get("ignore_eos") else self._end)
        if made is None:
            return None
        found = [self.words.decode(made[:count], skip_special_tokens=True) for count in range(len(made) + 1)]
        for count, grown in enumerate(found):
            places = [grown.find(stop) for stop in body.get("stop", ()) if stop in grown]
            if places:
                return Ask(body, ids, grown[: min(places)], count, "stop")
        ended = not body.get("ignore_eos") and made[-1] == self._end
        return Ask(body, ids, found[-1], len(made), "stop" if ended else "length")

    def _tokens(self, ids: Sequence[int], most: int, end: int | None) -> list[int] | None:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            found = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        for scores in found.logits:
            best = scores[0].topk(2).values
            if best[0] - best[1] < SURE:
                return None
        made: list[int] = found.sequences[0, len(ids) :].tolist()
        return made


def asks(numbers: random.Random, alone: Alone, count: int) -> list[Ask]:
    """Different greedy requests, with the answers that they have alone."""
    made: list[Ask] = []
    while len(made) < count:
        most = 10 ** numbers.choice((2, 2, 3, 12))
        question = f"{numbers.randrange(most)}+{numbers.randrange(most)}" + numbers.choice(("", "=", "=?"))
        if numbers.random() < 0.5:
            question = numbers.choice(SHARED)[: numbers.randrange(200)] + question
        body: dict[str, Any] = {"max_tokens": numbers.choice((1, 2, 8, 20, 40))}
        if numbers.random() < 0.5:
            body["messages"] = [{"role": "user", "content": question}]
        else:
            body["prompt"] = question
        if numbers.random() < 0.2:
            body["ignore_eos"] = True
        if numbers.random() < 0.2:
            body["stop"] = numbers.sample(["=", "2", "11", "+1", "\n"], 2)
        if (ask := alone.ask(body)) is not None:
            made.append(ask)
    return made


class Fuzz:
    """Sends requests and notes what is otherwise than alone."""

    def __init__(self, client: httpx.AsyncClient, known: Sequence[Ask], numbers: random.Random) -> None:
        self._client = client
        self._known = known
        self._numbers = numbers
        self._sampled: dict[str, str] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._kinds = {
            self._whole: 30, self._streamed: 20, self._cancelled: 15, self._left: 8, self._choices: 8,
            self._logprobs: 8, self._token_ids: 5, self._seeded: 8, self._warm: 4, self._refused: 6,
        }  # fmt: skip

    async def run(self, requests: int, at_once: int) -> None:
        """Send so many requests, so many of them at a time; every 2,000th a batch beside them."""
        left = iter(range(requests))
        began = time.monotonic()

        async def caller() -> None:
            for number in left:
                if number % 2_000 == 100:
                    batches.append(asyncio.create_task(self._batch()))
                if number % 2_000 == 1_999:
                    print(f"{number + 1} requests, {len(self.wrong)} wrong, {time.monotonic() - began:.0f} s")
                [kind] = self._numbers.choices(list(self._kinds), list(self._kinds.values()))
                self.counts[kind.__name__.strip("_")] += 1
                async with asyncio.timeout(LONGEST_S):
                    await kind(self._numbers.choice(self._known))

        batches: list[asyncio.Task[None]] = []
        await asyncio.gather(*(caller() for _ in range(at_once)))
        async with asyncio.timeout(10 * LONGEST_S):
            await asyncio.gather(*batches)

    def _check(self, ask: Ask, text: object, reason: object, how: str) -> None:
        if (text, reason) != (ask.text, ask.reason):
            self.wrong.append(f"{how}: {json.dumps(ask.body)}: {text!r} ({reason}) for {ask.text!r} ({ask.reason})")
            print(self.wrong[-1], flush=True)

    async def _post(self, ask: Ask, **more: Any) -> dict[str, Any]:
        response = await self._client.post(ask.url, json={**ask.body, **more})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def _whole(self, ask: Ask) -> None:
        answer = await self._post(ask)
        self._check(ask, _text(answer["choices"][0]), answer["choices"][0]["finish_reason"], "whole")
        if (made := answer["usage"]["completion_tokens"]) != ask.tokens:
            self.wrong.append(f"usage: {json.dumps(ask.body)}: {made} tokens for {ask.tokens}")

    async def _streamed(self, ask: Ask) -> None:
        text, reason = "", None
        async with self._client.stream("POST", ask.url, json={**ask.body, "stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                    reason = choice["finish_reason"] or reason
        self._check(ask, text, reason, "streamed")

    async def _cancelled(self, ask: Ask) -> None:
        """Leave in the middle of a stream."""
        left = self._numbers.randrange(4)
        more = {"stream": True, "max_tokens": 60, "ignore_eos": True}
        async with self._client.stream("POST", ask.url, json={**ask.body, **more}) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break

    async def _left(self, ask: Ask) -> None:
        """Leave before the answer."""
        try:
            async with asyncio.timeout(self._numbers.choice((0.001, 0.01, 0.05))):
                await self._post(ask, ignore_eos=True, max_tokens=60)
        except TimeoutError:
            pass

    async def _choices(self, ask: Ask) -> None:
        for choice in (await self._post(ask, n=3))["choices"]:
            self._check(ask, _text(choice), choice["finish_reason"], "n=3")

    async def _logprobs(self, ask: Ask) -> None:
        more = {"logprobs": True, "top_logprobs": 2} if "messages" in ask.body else {"logprobs": 2}
        [choice] = (await self._post(ask, **more))["choices"]
        self._check(ask, _text(choice), choice["finish_reason"], "logprobs")

    async def _token_ids(self, ask: Ask) -> None:
        body = {name: value for name, value in ask.body.items() if name != "messages"} | {"prompt": ask.ids}
        response = await self._client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        self._check(ask, _text(choice), choice["finish_reason"], "token ids")

    async def _seeded(self, ask: Ask) -> None:
        """The same seed gives the same text again."""
        [choice] = (await self._post(ask, temperature=1.0, seed=7))["choices"]
        before = self._sampled.setdefault(json.dumps(ask.body), _text(choice))
        if before != _text(choice):
            self.wrong.append(f"seeded: {json.dumps(ask.body)}: {_text(choice)!r} for {before!r}")

    async def _warm(self, ask: Ask) -> None:
        """Sampled as it comes, at a high temperature."""
        await self._post(ask, temperature=self._numbers.choice((1e-12, 2.0, 100.0)), min_tokens=1, n=2)

    async def _refused(self, ask: Ask) -> None:
        more = self._numbers.choice(({"beam": 2}, {"temperature": -1}, {"n": 0}, {"stop": [""]}, {"top_p": 0}))
        response = await self._client.post(ask.url, json={**ask.body, **more})
        assert response.status_code == 400, response.text

    async def _batch(self) -> None:
        """A batch of the Batch API, to its end."""
        chosen = [ask for ask in self._known if "prompt" in ask.body][:BATCH_LINES]
        rows = [
            {"custom_id": str(n), "method": "POST", "url": ask.url, "body": ask.body} for n, ask in enumerate(chosen)
        ]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        response = await self._client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})
        body = {"input_file_id": response.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await self._client.post("/v1/batches", json=body)).json()
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.2)
            batch = (await self._client.get(f"/v1/batches/{batch['id']}")).json()
        lines = (await self._client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
        assert len(lines) == len(chosen), batch
        for line in map(json.loads, lines):
            [choice] = line["response"]["body"]["choices"]
            self._check(chosen[int(line["custom_id"])], _text(choice), choice["finish_reason"], "batch")


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def fuzz(requests: int, seed: int, different: int, at_once: int, **options: Any) -> Fuzz:
    """Send the requests to a server of its own; `options` are those of the engine."""
    numbers = random.Random(seed)
    known = asks(numbers, Alone(ARITHMETIC), different)
    config = EngineConfig("generate", engine_options=options)
    with tempfile.TemporaryDirectory() as state:
        settings = ServerSettings(config, state=Path(state), limits=ServeLimits(drain_s=2))
        with running(settings) as server:
            free = server.engine._scheduler.pages.available

            async def main() -> Fuzz:
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S, limits=limits) as client:
                    fuzz = Fuzz(client, known, numbers)
                    await fuzz.run(requests, at_once)
                    # All pages are free again once the cancelled ones have left.
                    [last] = (await fuzz._post(known[0], n=1))["choices"]
                    fuzz._check(known[0], _text(last), last["finish_reason"], "last")
                    return fuzz

            done = asyncio.run(main())
            waited = time.monotonic()  # a request leaves a moment after its answer
            while (
                not done.wrong
                and server.engine._scheduler.pages.available != free
                and time.monotonic() - waited < LONGEST_S
            ):
                time.sleep(0.05)
            if server.engine._scheduler.pages.available != free:
                done.wrong.append(f"{server.engine._scheduler.pages.available} pages are free, of {free}")
    return done


def main() -> int:
    """Send so many requests; status 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--different", type=int, default=300, help="different greedy requests")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-cache-tokens", type=int, default=640, help="few, so that answers make room for others")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    done = fuzz(
        options.requests, options.seed, options.different, options.at_once,
        max_num_seqs=options.max_num_seqs, kv_cache_tokens=options.kv_cache_tokens,
    )  # fmt: skip
    print(*done.wrong[:20], sep="\n")
    print(
        f"{dict(done.counts)}\n{options.requests} requests, {len(done.wrong)} wrong, {time.monotonic() - began:.0f} s"
    )
    return 1 if done.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
