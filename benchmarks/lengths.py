"""Answers of unknown lengths with too little cache: learned lengths, lengths known beforehand, and neither.

python -m benchmarks.lengths

No scheduler reaches known lengths if nothing tells a short answer from a long one before it ends. One that knows the
exact distribution of long-tailed lengths, but not each length, takes 1.07 times as long and computes 1.2 % of the
tokens again, or 1.03 times and 4.2 % if it keeps less room free (`tests/unit/batching/test_growth.py`).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import quick, report
from benchmarks.generation import model_folder
from headrace import ContinuousBatcher
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation

PROMPTS = 48 if quick() else 192
SLOTS = 64
LONGEST = 256
KNOWN = "known beforehand"
KINDS = ("constant", "long-tailed", "by prompt", "drifting")


def requests(kind: str) -> list[dict[str, Any]]:
    """Prompts of 10 to 60 characters, or of 150 to 180, and the length of each answer."""
    rng = random.Random(0)
    found = []
    for number in range(PROMPTS):
        size, length = rng.randint(10, 60), 64
        if kind == "long-tailed":
            length = min(max(round(rng.lognormvariate(3.3, 1.1)), 4), LONGEST)
        elif kind == "by prompt":
            size, length = rng.choice([(size, rng.randint(8, 16)), (size + 130, rng.randint(150, 200))])
        elif kind == "drifting":
            length = round(20 + 200 * number / PROMPTS + rng.uniform(-8, 8))
        text = "".join(rng.choices("abcdefghij +=0123456789", k=size))
        found.append({"prompt": text, "max_tokens": length, "ignore_eos": True})
    return found


class Unknown:
    """The engine, without knowing how long an answer gets: each may have `LONGEST` tokens."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.add, self.step, self.needs, self.remove = engine.add, engine.step, engine.needs, engine.remove
        self.shared, self.overlap, self.group = engine.shared, engine.overlap, engine.group

    def span(self, record: Any) -> tuple[float, float]:
        """The prompt with one token, and with the longest answer that any may have."""
        ask = getattr(record, "ask", record)
        return len(ask.prompt) + 1, len(ask.prompt) + LONGEST


def main() -> None:
    """Measure all of them in turn and print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        engine = GenerationEngine(Generation(model=folder, max_num_seqs=SLOTS, enable_prefix_caching=False))
    rows = [row for kind in KINDS for row in measured(engine, kind)]
    note = (
        f"{PROMPTS} prompts, {SLOTS} slots, at most {LONGEST} tokens each; a Llama of 4 M random weights, float32, "
        "one thread, greedy; one round. Computed again: share of all tokens."
    )
    report(
        "lengths",
        "Answers of unknown lengths, with a cache for a quarter of the demand",
        ["lengths", "variant", "s of a core", "x known", "computed again", "answers as known"],
        rows,
        [note],
    )


def measured(engine: GenerationEngine, kind: str) -> list[list[Any]]:
    """The rows of one kind of lengths."""
    asks = [prepared.payload for prepared in engine.prepare(requests(kind)) if not isinstance(prepared, Exception)]
    needs = [len(ask.prompt) + ask.sampling.max_tokens for ask in asks]
    cache = max(SLOTS * sum(needs) / len(needs) / 4, max(len(ask.prompt) for ask in asks) + LONGEST)
    variants: dict[str, tuple[Any, bool]] = {
        KNOWN: (engine, False),
        "learned": (Unknown(engine), True),
        "taken to be the longest": (Unknown(engine), False),
    }
    answers: dict[str, list[str]] = {}
    again: dict[str, float] = {}

    def seconds(name: str) -> float:
        model, learns = variants[name]
        before = engine.prefix_cache_stats()
        started = time.process_time()
        answers[name] = asyncio.run(_answers(model, learns, asks, cache))
        took = time.process_time() - started
        read = engine.prefix_cache_stats().since(before).queries - sum(len(ask.prompt) for ask in asks)
        again[name] = read / sum(needs)
        return took

    took = {name: seconds(name) for name in variants}
    known = took[KNOWN], answers[KNOWN]
    return [[kind, name, s, s / known[0], again[name], answers[name] == known[1]] for name, s in took.items()]


async def _answers(model: Any, learns: bool, asks: Sequence[Any], cache: float) -> list[str]:
    batcher: ContinuousBatcher[Any, Any] = ContinuousBatcher(model, max_slots=SLOTS, max_cost=cache)
    if not learns:
        batcher._growth.finished = lambda *_: None  # type: ignore[method-assign]
    async with batcher:
        return [answer["text"] async for answer in batcher.map(asks)]


if __name__ == "__main__":
    main()
