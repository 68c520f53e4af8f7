"""Generate answers of long-tailed lengths on a CPU: continuous batching and static batches, with the same answers.

python -m benchmarks.generation
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.common import quick, ratio, report, rounds, version
from headrace import ContinuousBatcher
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation, StaticGeneration
from headrace.engines.generation.static import StaticGenerationEngine

PROMPTS = 48 if quick() else 256
ROUNDS = 1 if quick() else 3
ALONE = 8 if quick() else 32
STATIC, SLOTS = 16, 64
SHORTEST, LONGEST = 4, 256
ONCE = "one round"
Asks = Sequence[Any]
Answers = list[str]


def model_folder(folder: Path, width: int = 256, layers: int = 5) -> Path:
    """A Llama of 4 million random weights, unless told otherwise, which go on talking for ever."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(ARITHMETIC)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,  # the usual 0.02 leaves random logits so flat that rounding decides
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def requests() -> list[dict[str, Any]]:
    """Prompts of 10 to 60 characters; answers of 4 to 256 tokens, half of them of less than 30, a few the longest."""
    rng = random.Random(0)
    lengths = [min(max(round(rng.lognormvariate(3.3, 1.1)), SHORTEST), LONGEST) for _ in range(PROMPTS)]
    return [
        {
            "prompt": "".join(rng.choices("abcdefghij +=0123456789", k=rng.randint(10, 60))),
            "max_tokens": length,
            "ignore_eos": True,
        }
        for length in lengths
    ]


def generate(model: Any, words: Any, asks: Asks, size: int) -> Answers:
    """`model.generate` on batches as they come: each runs to its longest answer."""
    answers: Answers = []
    for start in range(0, len(asks), size):
        batch = asks[start : start + size]
        width = max(len(ask.prompt) for ask in batch)
        ids = torch.tensor([[0] * (width - len(ask.prompt)) + list(ask.prompt) for ask in batch])
        mask = torch.tensor([[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in batch])
        most = max(ask.sampling.max_tokens for ask in batch)
        config = GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0)
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
        for row, ask in zip(made, batch, strict=True):
            answers.append(words.decode(row[: ask.sampling.max_tokens], skip_special_tokens=True))
    return answers


def manager(model: Any, words: Any, asks: Asks) -> Answers:
    """transformers' own continuous batching, with its own thread and the same room."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=SLOTS * 17 + 1,
        max_batch_tokens=512,
        max_requests_per_batch=SLOTS,
        safety_margin=0.0,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers: dict[str, str] = {}
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as running:
        for number, ask in enumerate(asks):
            running.add_request(list(ask.prompt), request_id=str(number), max_new_tokens=ask.sampling.max_tokens)
        while len(answers) < len(asks):
            done = running.get_result(timeout=1)
            if done is not None:
                answers[done.request_id] = words.decode(done.generated_tokens, skip_special_tokens=True)
    return [answers[str(number)] for number in range(len(asks))]


def static(engine: StaticGenerationEngine, asks: Asks) -> Answers:
    """Headrace's fallback: the same static batches, that take each record's own parameters."""
    return [
        answer["text"]
        for start in range(0, len(asks), STATIC)
        for answer in engine.forward(list(asks[start : start + STATIC]))
    ]


async def _continuous(engine: GenerationEngine, asks: Asks) -> Answers:
    async with ContinuousBatcher(
        engine, max_slots=engine.profile.max_in_flight, max_cost=engine.profile.max_cost
    ) as batcher:
        return [answer["text"] async for answer in batcher.map(asks)]


def main() -> None:
    """Measure all of them in turn and print the table."""
    torch.set_num_threads(1)  # so small a model gains nothing from more, and is disturbed by everything
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig()
        words = AutoTokenizer.from_pretrained(folder)
        engine, fallback = (
            GenerationEngine(Generation(model=folder, max_num_seqs=SLOTS)),
            StaticGenerationEngine(StaticGeneration(model=folder)),
        )
    asks = [prepared.payload for prepared in engine.prepare(requests()) if not isinstance(prepared, Exception)]
    tokens = sum(ask.sampling.max_tokens for ask in asks)
    peer = version("transformers")
    variants: dict[str, Callable[[], Answers]] = {
        f"{peer}, generate, batches of {STATIC}": partial(generate, model, words, asks, STATIC),
        f"{peer}, continuous batching, {SLOTS} slots": partial(manager, model, words, asks),
        f"headrace, static batches of {STATIC}, {ONCE}": partial(static, fallback, asks),
        f"headrace, continuous, {SLOTS} slots": lambda: asyncio.run(_continuous(engine, asks)),
    }
    answers: dict[str, Answers] = {}

    def seconds(name: str) -> float:
        started = time.perf_counter()
        answers[name] = variants[name]()
        return time.perf_counter() - started

    generate(model, words, asks[:4], 4)
    figures = rounds(1, {name: partial(seconds, name) for name in variants})
    often = {name: partial(seconds, name) for name in variants if not name.endswith(ONCE)}
    for name, times in rounds(ROUNDS - 1, often).items():
        figures[name] += times
    alone = generate(model, words, asks[:ALONE], 1)
    baseline = figures[next(iter(variants))]
    rows = [
        [
            name,
            tokens / statistics.median(times),
            ratio(baseline[: len(times)], times),
            sum(a == b for a, b in zip(answers[name], alone, strict=False)) / ALONE,
        ]
        for name, times in figures.items()
    ]
    note = (
        f"{len(asks)} prompts, {tokens:,} tokens of answers ({SHORTEST} to {LONGEST}); a Llama of 4 M random weights, "
        f"float32, one thread, greedy; medians of {ROUNDS} rounds, the variants in turn. Equal to alone: share of the "
        f"first {ALONE} answers that are those of a batch of one, letter by letter."
    )
    report(
        "generation",
        "Generation on a CPU, answers of long-tailed lengths",
        ["variant", "tokens/s", f"x batches of {STATIC}", "equal to alone"],
        rows,
        [note],
    )


if __name__ == "__main__":
    main()
