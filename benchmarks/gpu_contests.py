"""What `benchmarks.gpu` measures: real architectures with random weights, headrace and the usual way side by side."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import headrace
from benchmarks.common import version
from benchmarks.gpu_models import FLOPS, bert, photographs, prompts, qwen, texts, vit
from benchmarks.streaming import streamed
from headrace import ContinuousBatcher
from headrace.engines.choosing import registry
from headrace.engines.generation.paged_attention import NAME
from headrace.observe.reporting.table import as_text

ROUNDS = 3
PEERS = 6
"""The usual ways run every n-th of the inputs, for they are slow and time on a GPU is short."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one variant reached."""

    model: str
    variant: str
    unit: str
    per_second: float
    slower: float
    """How many times as fast headrace is."""
    busy: float | None
    """Share of the time in which the device computed."""
    mfu: float
    """Share of the measured peak of matrix products."""


@dataclass
class Setting:
    """Where and how large."""

    device: str
    tiny: bool
    folder: Path
    peak: float
    """Of the device, measured, in FLOP/s."""
    ends: float
    """When to stop, by the monotonic clock: no round begins later."""

    @property
    def dtype(self) -> str:
        """bfloat16 has no fast way on most CPUs."""
        return "float32" if self.tiny else "bfloat16"


def step_clock(engine: Any) -> Callable[[], float]:
    """Seconds in an engine's steps so far, seen from outside: from each call to its results on the CPU."""
    seconds, real = [0.0], engine.step

    def timed() -> Any:
        started = time.perf_counter()
        try:
            return real()
        finally:
            seconds[0] += time.perf_counter() - started

    engine.step = timed
    return lambda: seconds[0]


def device_clock(engine: Any) -> Callable[[], float]:
    """Seconds in which an encoder's device has computed so far, by events on the device."""
    return lambda: float(engine.forward_meter().read().seconds)


@dataclass
class Contest:
    """Variants on the same inputs; those called headrace are ours, and all are compared with the last one by rate."""

    model: str
    unit: str
    amount: int
    """Units of work in the inputs."""
    flops: float
    """Of the model for all inputs, padding not counted."""
    variants: Mapping[str, Callable[[], Any]]
    busy_s: Callable[[], float]
    """Seconds in which headrace's engine was at work so far."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the inputs, for the variants that run only a part of them because they are slow."""
    rounds: int = ROUNDS


def matrix_peak(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of 20 products of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        finish(device)
        started = time.perf_counter()
        a @ b
        finish(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def finish(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(contest: Contest, setting: Setting) -> list[Row]:
    """All variants in turn, after one round that is not counted. Stops when the time is up, with what there is."""
    rates: dict[str, list[float]] = {name: [] for name in contest.variants}
    busy: dict[str, list[float]] = {name: [] for name in contest.variants}
    count = 1 if setting.tiny else contest.rounds
    for number in range(count + 1):
        for name, run in contest.variants.items():
            if number > 1 and time.monotonic() > setting.ends:
                break
            before, started = contest.busy_s(), time.perf_counter()
            run()
            finish(setting.device)
            took = time.perf_counter() - started
            if number:
                rates[name].append(contest.amount * contest.shares.get(name, 1.0) / took)
                busy[name].append((contest.busy_s() - before) / took)
    ours = statistics.median(rates[list(contest.variants)[-1]])
    rows: list[Row] = []
    for name, found in rates.items():
        rate = statistics.median(found)
        working = statistics.median(busy[name]) if name.startswith("headrace") else None
        used = contest.flops / contest.amount * rate / setting.peak
        rows.append(Row(contest.model, name, contest.unit, rate, ours / rate, working, used))
    return rows


def embedding(setting: Setting) -> Contest:
    """BERT-base, the mean of its token states, on texts of mixed length."""
    from sentence_transformers import SentenceTransformer

    folder, inputs = bert(setting.folder / "bert", setting.tiny), texts(setting.tiny)
    engine = registry.create("embed", folder, device=setting.device, dtype=setting.dtype, max_model_len=256)
    numbers = {"dtype": getattr(torch, setting.dtype)}
    peer = SentenceTransformer(str(folder), device=setting.device, model_kwargs=numbers)
    peer.max_seq_length = 256
    name = version("sentence-transformers")
    lengths = [one.cost for one in engine.prepare(inputs)]
    some = inputs[:: 1 if setting.tiny else PEERS]
    peers = {
        f"{name}, encode": lambda: peer.encode(some),
        **{f"{name}, encode, batch_size={n}": partial(peer.encode, some, batch_size=n) for n in (128, 512)},
    }
    return Contest(
        "BERT-base",
        "tokens",
        sum(lengths),
        FLOPS["bert"](peer[0].model, lengths),
        {
            **peers,
            "headrace, one batch at a time": lambda: streamed(engine, inputs, chunk=256, overlap=False),
            "headrace": lambda: streamed(engine, inputs, chunk=256),
        },
        device_clock(engine),
        dict.fromkeys(peers, len(some) / len(inputs)),
    )


def long_texts(setting: Setting) -> Contest:
    """BERT-base on texts of 512 tokens, tokenized before: what is left is the device."""
    folder = bert(setting.folder / "bert", setting.tiny)
    engine = registry.create("embed", folder, device=setting.device, dtype=setting.dtype)
    length = engine.profile.max_model_len
    ready = [one.payload for one in engine.prepare(["canal " * length] * (4 if setting.tiny else 4_096))]
    size = max(round(engine.profile.batch_cost / length), 1)
    batches = [ready[start : start + size] for start in range(0, len(ready), size)]

    def run() -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(engine.forward, batches))

    lengths = [one.shape[1] for one in ready]
    flops = FLOPS["bert"](engine.network.module[0].model, lengths)
    model = f"BERT-base, {length} tokens"
    return Contest(model, "tokens", sum(lengths), flops, {"headrace": run}, device_clock(engine))


def small_batches(setting: Setting) -> Contest:
    """BERT-base on batches of 8 short texts, as a server gets them, with and without CUDA graphs."""
    folder = bert(setting.folder / "bert", setting.tiny)
    engine = registry.create("embed", folder, device=setting.device, dtype=setting.dtype, max_model_len=64)
    ready = [one.payload for one in engine.prepare(texts(setting.tiny)[:2_048])]
    graphs = engine.network.graphs

    def run(with_graphs: bool) -> None:
        engine.network.graphs = graphs if with_graphs else None
        for start in range(0, len(ready), 8):
            engine.forward(ready[start : start + 8])

    lengths = [one.shape[1] for one in ready]
    return Contest(
        "BERT-base, batches of 8",
        "tokens",
        sum(lengths),
        FLOPS["bert"](engine.network.module[0].model, lengths),
        {"headrace, eager": lambda: run(False), "headrace": lambda: run(True)},
        device_clock(engine),
    )


def images(setting: Setting) -> Contest:
    """ViT-B/16 on JPEG files, decoding included."""
    from transformers import pipeline

    folder = vit(setting.folder / "vit", setting.tiny)
    files = photographs(setting.folder, setting.tiny)
    engine = registry.create("image-classify", folder, device=setting.device, dtype=setting.dtype)
    peer = pipeline(
        "image-classification", str(folder), device=setting.device, dtype=getattr(torch, setting.dtype), top_k=1
    )
    name = f"{version('transformers')} pipeline"
    some = files[: len(files) // (1 if setting.tiny else PEERS)]
    peers = {
        f"{name}, one by one": lambda: list(peer(some)),
        f"{name}, batch_size=64": lambda: list(peer(some, batch_size=64)),
    }
    return Contest(
        "ViT-B/16",
        "images",
        len(files),
        FLOPS["vit"](peer.model, [0] * len(files)),
        {
            **peers,
            "headrace, one batch at a time": lambda: streamed(
                engine, files, chunk=engine.profile.prepare_rows, overlap=False
            ),
            "headrace": lambda: streamed(engine, files, chunk=engine.profile.prepare_rows),
        },
        device_clock(engine),
        dict.fromkeys(peers, len(some) / len(files)),
    )


def generation(setting: Setting) -> Contest:
    """Qwen2.5-7B shapes, prompts of mixed length and answers of long-tailed lengths, greedy."""
    folder, requests = qwen(setting.folder / "qwen", setting), prompts(setting.tiny)
    slots = 8 if setting.tiny else 128
    engine = registry.create(
        "generate", folder, device=setting.device, dtype=setting.dtype, max_num_seqs=slots, max_model_len=1024
    )
    asks = [prepared.payload for prepared in engine.prepare(requests)]
    answered = sum(ask.sampling.max_tokens for ask in asks)
    some = asks[:: 1 if setting.tiny else 4]
    share = sum(ask.sampling.max_tokens for ask in some) / answered
    peers = {f"{version('transformers')}, generate, batches of {size}": size for size in (16, slots)}
    model = engine._lm.model  # one copy of the weights is enough for both
    attention = model.config._attn_implementation
    return Contest(
        "Qwen2.5-7B",
        "answer tokens",
        answered,
        FLOPS["qwen"](model, [len(ask.prompt) + ask.sampling.max_tokens for ask in asks]),
        {
            **{name: partial(static, model, some, size) for name, size in peers.items()},
            f"headrace, continuous, {slots} slots": lambda: continuous(engine, asks, attention),
        },
        step_clock(engine),
        dict.fromkeys(peers, share),
        rounds=1,
    )


def continuous(engine: Any, asks: Sequence[Any], attention: str) -> list[Any]:
    """All answers, as many at a time as there are slots."""

    async def run() -> list[Any]:
        async with ContinuousBatcher(
            engine, max_slots=engine.profile.max_in_flight, max_cost=engine.profile.max_cost
        ) as batcher:
            return [answer async for answer in batcher.map(asks)]

    engine._lm.model.set_attn_implementation(attention)
    return asyncio.run(run())


@torch.inference_mode()
def static(model: Any, asks: Sequence[Any], size: int) -> None:
    """`model.generate` on padded batches as they come, each to its longest answer."""
    from transformers import GenerationConfig

    if model.config._attn_implementation == NAME:  # headrace's, for continuous batches alone
        model.set_attn_implementation("sdpa")
    for start in range(0, len(asks), size):
        batch = asks[start : start + size]
        width = max(len(ask.prompt) for ask in batch)
        ids = torch.tensor([[0] * (width - len(ask.prompt)) + list(ask.prompt) for ask in batch])
        mask = torch.tensor([[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in batch])
        most = max(ask.sampling.max_tokens for ask in batch)
        config = GenerationConfig(do_sample=False, max_new_tokens=most, min_new_tokens=most, pad_token_id=0)
        model.generate(ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config)


def drop(outputs: list[dict[str, Any]]) -> None:
    """Where outputs go that nobody wants."""


def job(setting: Setting) -> tuple[list[Row], list[tuple[str, float]]]:
    """A whole job as it comes: its rate, and the budget, memory, computing time and limit that its report names."""
    folder, inputs = bert(setting.folder / "bert", setting.tiny), texts(setting.tiny)
    rows = [{"id": str(number), "text": text} for number, text in enumerate(inputs)]
    done = headrace.run(
        rows,
        str(folder),
        sink=drop,
        task="embed",
        device=setting.device,
        dtype=setting.dtype,
        max_model_len=256,
        progress=False,
    )
    print(as_text(done), flush=True)
    device, memory = done.device, done.memory
    mfu = device.mfu if device is not None and device.mfu is not None else 0.0
    busy = device.computed if device is not None else None
    row = Row("BERT-base", "headrace.run as it comes", "tokens", done.tokens_per_s or 0.0, 1.0, busy, mfu)
    figures = [("memory of a job as it comes", memory.peak / memory.limit)] if memory is not None else []
    return [row], figures


CONTESTS: Mapping[str, Callable[[Setting], Contest]] = {
    "bert": embedding,
    "long": long_texts,
    "small": small_batches,
    "vit": images,
    "qwen": generation,
}
