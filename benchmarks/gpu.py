"""Real architectures with random weights on a GPU: headrace and the usual way to run each, side by side.

python -m benchmarks.gpu                        # BERT-base, ViT-B/16, Qwen2.5-7B shapes in bfloat16
python -m benchmarks.gpu --only bert,vit
python -m benchmarks.gpu --device cpu --tiny    # the same with tiny shapes: a test, not a measurement
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import headrace
from benchmarks.common import ratio, report, rounds, version
from benchmarks.gpu_models import FLOPS, bert, photographs, prompts, qwen, texts, vit
from benchmarks.streaming import streamed
from headrace import ContinuousBatcher
from headrace.engines.choosing import registry
from headrace.engines.generation.ragged_attention import NAME

ROUNDS = 3
COLUMNS = [
    "model",
    "variant",
    "unit",
    "per second",
    "headrace is x times as fast",
    "device busy",
    "share of matrix peak",
]


@dataclass
class Setting:
    """Where and how large."""

    device: str
    tiny: bool
    folder: Path
    peak: float
    """Of the device, measured, in FLOP/s."""

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
    """Variants on the same inputs; those called headrace are ours, and all are compared with the last one."""

    model: str
    unit: str
    amount: int
    """Units of work in the inputs."""
    flops: float
    """Of the model for all inputs, padding not counted."""
    variants: Mapping[str, Callable[[], Any]]
    busy_s: Callable[[], float]
    """Seconds in which headrace's engine was at work so far."""


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


def measure(contest: Contest, setting: Setting) -> list[list[Any]]:
    """All variants in turn, after one round that is not counted."""
    busy: dict[str, list[float]] = {name: [] for name in contest.variants}
    ours = list(contest.variants)[-1]

    def seconds(name: str) -> float:
        before = contest.busy_s()
        started = time.perf_counter()
        contest.variants[name]()
        finish(setting.device)
        took = time.perf_counter() - started
        busy[name].append((contest.busy_s() - before) / took)
        return took

    variants = {name: partial(seconds, name) for name in contest.variants}
    rounds(1, variants)
    for times in busy.values():
        times.clear()
    figures = rounds(1 if setting.tiny else ROUNDS, variants)
    rows: list[list[Any]] = []
    for name, times in figures.items():
        took = statistics.median(times)
        speed, share = contest.amount / took, contest.flops / took / setting.peak
        working = statistics.median(busy[name]) if name.startswith("headrace") else "-"
        rows.append([contest.model, name, contest.unit, speed, ratio(times, figures[ours]), working, share])
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
    return Contest(
        "BERT-base",
        "tokens",
        sum(lengths),
        FLOPS["bert"](peer[0].model, lengths),
        {
            f"{name}, encode": lambda: peer.encode(inputs),
            f"{name}, encode, batch_size=256": lambda: peer.encode(inputs, batch_size=256),
            "headrace, one batch at a time": lambda: streamed(engine, inputs, chunk=256, overlap=False),
            "headrace": lambda: streamed(engine, inputs, chunk=256),
        },
        device_clock(engine),
    )


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
        {"headrace without graphs": lambda: run(False), "headrace": lambda: run(True)},
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
    return Contest(
        "ViT-B/16",
        "images",
        len(files),
        FLOPS["vit"](peer.model, [0] * len(files)),
        {
            f"{name}, defaults": lambda: list(peer(files)),
            f"{name}, batch_size=64": lambda: list(peer(files, batch_size=64)),
            "headrace, one batch at a time": lambda: streamed(
                engine, files, chunk=engine.profile.prepare_rows, overlap=False
            ),
            "headrace": lambda: streamed(engine, files, chunk=engine.profile.prepare_rows),
        },
        device_clock(engine),
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
    model = engine._lm.model  # one copy of the weights is enough for both
    name = version("transformers")
    attention = model.config._attn_implementation
    return Contest(
        "Qwen2.5-7B",
        "answer tokens",
        answered,
        FLOPS["qwen"](model, [len(ask.prompt) + ask.sampling.max_tokens for ask in asks]),
        {
            **{f"{name}, generate, batches of {size}": partial(static, model, asks, size) for size in (16, slots)},
            f"headrace, continuous, {slots} slots": lambda: continuous(engine, asks, attention),
        },
        step_clock(engine),
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

    if model.config._attn_implementation == NAME:  # headrace's on a CPU, for continuous batches alone
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


def job(setting: Setting) -> list[list[Any]]:
    """A whole job as it comes: which budget it found, how much memory it filled, and what the device did."""
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
    device, memory = done.device, done.memory
    return [
        [
            "BERT-base",
            done.tokens_per_s,
            done.budget or "as the engine has it",
            memory.peak / memory.limit if memory is not None else "-",
            memory.source if memory is not None else "-",
            device.computed if device is not None else "-",
            device.mfu if device is not None and device.mfu is not None else "-",
            device.limit or "-" if device is not None else "-",
        ]
    ]


CONTESTS: Mapping[str, Callable[[Setting], Contest]] = {
    "bert": embedding,
    "small": small_batches,
    "vit": images,
    "qwen": generation,
}


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in float32, one round, no JSON")
    parser.add_argument("--only", default=",".join(CONTESTS), help="some of %(default)s")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device; --device cpu --tiny shows that the script works")
    numbers = torch.float32 if given.tiny else torch.bfloat16
    peak = matrix_peak(given.device, 512 if given.tiny else 8192, numbers)
    rows: list[list[Any]] = []
    jobs: list[list[Any]] = []
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(given.device, given.tiny, Path(folder), peak)
            rows += measure(CONTESTS[name](setting), setting)
            if name == "bert":
                jobs = job(setting)
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
    where = (
        torch.cuda.get_device_name() if given.device.startswith("cuda") else "the CPU, tiny shapes: no figures to quote"
    )
    report(
        None if given.tiny else "gpu",
        f"Random weights on {where}",
        COLUMNS,
        rows,
        [
            f"{str(numbers).removeprefix('torch.')}; matrix peak measured here: {peak / 1e12:.2f} TFLOP/s.",
            "Tokens are those of the texts, padding not counted.",
            f"Medians of {1 if given.tiny else ROUNDS} rounds, the variants in turn, after one that is not counted.",
        ],
    )
    if jobs:
        report(
            None if given.tiny else "gpu-jobs",
            f"A whole job as it comes on {where}",
            ["model", "tokens/s", "budget found", "of the memory", "memory of", "device computed", "MFU", "limit"],
            jobs,
            ["headrace.run with nothing set but the dtype: the budget follows throughput and memory while it runs."],
        )


if __name__ == "__main__":
    main()
