"""What `benchmarks.gpu` measures: real architectures with random weights, headrace and the usual way side by side."""

from __future__ import annotations

import asyncio
import os
import random
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
from headrace import ContinuousBatcher
from headrace.engines.choosing import registry
from headrace.engines.generation.paged_attention import NAME
from headrace.engines.networks.fusing import unfuse
from headrace.observe.reporting.table import as_text

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """What one variant reached."""

    model: str
    variant: str
    unit: str
    per_second: float
    slower: float
    """How many times as fast headrace is, which is measured first."""
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
    """When to stop, by `clock`: no round begins that would end later."""
    clock: Callable[[], float] = time.monotonic

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
    """Variants on the same inputs, ours first. Each runs as many of them as its share of the time allows."""

    model: str
    unit: str
    inputs: Sequence[Any]
    units: Sequence[int]
    """Of work, in each input."""
    flops: Callable[[Sequence[int]], float]
    """Of the model for inputs of so many units, padding not counted."""
    variants: Mapping[str, Callable[[Sequence[Any]], Any]]
    busy_s: Callable[[], float]
    """Seconds in which headrace's engine was at work so far."""
    least: int
    """Inputs of the first run, which tells how many fit."""
    fewer: Mapping[str, int] = field(default_factory=dict)
    """The same, for slow variants."""


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


def measure(contest: Contest, setting: Setting, tell: Callable[[Row], None]) -> None:
    """One variant after the other, ours first; each row is told as soon as it is known.

    A variant has an equal share of the time that is left. Two runs of a few inputs tell how many fit into it three
    times; what they say is the row where not even one such run fits.
    """
    ours = 0.0
    for place, (name, run) in enumerate(contest.variants.items()):
        until = setting.clock() + (setting.ends - setting.clock()) / (len(contest.variants) - place)
        count = few = min(contest.fewer.get(name, contest.least), len(contest.inputs))
        found = [_run(contest, setting, run, count)]
        if setting.clock() + found[0][0] <= until:
            found = [_run(contest, setting, run, count)]  # kernels are loaded now
        left = until - setting.clock()
        count = max(min(int(count * left / (ROUNDS + 0.5) / found[0][0]), len(contest.inputs)), count)
        rounds: list[tuple[float, float, float]] = []
        expected = found[0][0] * sum(contest.units[:count]) / sum(contest.units[:few])
        while len(rounds) < (1 if setting.tiny else ROUNDS) and setting.clock() + expected <= until:
            rounds.append(_run(contest, setting, run, count))
            expected = max(one[0] for one in rounds)
        _, rate, busy = statistics.median_low(sorted(rounds or found, key=lambda one: one[1]))
        ours = ours or rate
        used = contest.flops(contest.units) / sum(contest.units) * rate / setting.peak
        working = busy if name.startswith("headrace") else None
        tell(Row(contest.model, name, contest.unit, rate, ours / rate, working, used))


def _run(
    contest: Contest, setting: Setting, run: Callable[[Sequence[Any]], Any], count: int
) -> tuple[float, float, float]:
    """Seconds, units per second, and the share of the time in which headrace's engine was at work."""
    before, started = contest.busy_s(), setting.clock()
    run(contest.inputs[:count])
    finish(setting.device)
    took = max(setting.clock() - started, 1e-9)
    return took, sum(contest.units[:count]) / took, (contest.busy_s() - before) / took


def mixed(inputs: Sequence[Any]) -> list[Any]:
    """In an order in which the first ones are like all."""
    return random.Random(0).sample(list(inputs), len(inputs))


class Jobs:
    """Runs jobs of a loaded model, whose inputs are in this column.

    Args:
        model: as `headrace.load` gives it.
        column: of the inputs.
    """

    def __init__(self, model: Any, column: str) -> None:
        self._model = model
        self._column = column
        self.computed_s = 0.0
        """In which the device computed, by the reports."""

    def __call__(self, inputs: Sequence[Any]) -> None:
        rows = [{"id": str(number), self._column: one} for number, one in enumerate(inputs)]
        done = self._model.run(rows, sink=drop, progress=False)
        assert done.ok == len(rows)
        if done.device is not None:
            self.computed_s += (done.device.computed or 0.0) * done.wall_s


def all_threads(run: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """A peer with a tokenizer that uses all cores: Headrace switches that off for its own."""

    def running(inputs: Sequence[Any]) -> Any:
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        try:
            return run(inputs)
        finally:
            os.environ.pop("TOKENIZERS_PARALLELISM")
            if before is not None:
                os.environ["TOKENIZERS_PARALLELISM"] = before

    return running


def embedding(setting: Setting) -> Contest:
    """BERT-base, the mean of its token states, on texts of mixed length: jobs of a loaded model."""
    from sentence_transformers import SentenceTransformer

    folder, inputs = bert(setting.folder / "bert", setting.tiny), mixed(texts(setting.tiny))
    model = headrace.load("embed", folder, device=setting.device, dtype=setting.dtype, max_model_len=256)
    ours = Jobs(model, "text")
    numbers = {"dtype": getattr(torch, setting.dtype)}
    peer = SentenceTransformer(str(folder), device=setting.device, model_kwargs=numbers)
    peer.max_seq_length = 256
    name = version("sentence-transformers")
    counts = {text: len(peer.tokenizer(text, truncation=True, max_length=256).input_ids) for text in set(inputs)}
    return Contest(
        "BERT-base",
        "tokens",
        inputs,
        [counts[text] for text in inputs],
        partial(FLOPS["bert"], peer[0].model),
        {
            "headrace": ours,
            f"{name}, encode, batch_size=512": all_threads(partial(peer.encode, batch_size=512)),
            f"{name}, encode, batch_size=128": all_threads(partial(peer.encode, batch_size=128)),
            f"{name}, encode": all_threads(peer.encode),
        },
        lambda: ours.computed_s,
        least=2_048,
    )


def long_texts(setting: Setting) -> Contest:
    """BERT-base on texts of 512 tokens, tokenized before: what is left is the device."""
    folder = bert(setting.folder / "bert", setting.tiny)
    engine = registry.create("embed", folder, device=setting.device, dtype=setting.dtype)
    length = engine.profile.max_model_len
    ready = [one.payload for one in engine.prepare(["canal " * length] * (4 if setting.tiny else 8_192))]
    size = max(round(engine.profile.batch_cost / length), 1)

    def run(some: Sequence[Any]) -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(engine.forward, [list(some[at : at + size]) for at in range(0, len(some), size)]))

    base = engine.network.module[0].model

    def apart(some: Sequence[Any]) -> None:
        unfuse(base)
        run(some)

    lengths = [one.shape[1] for one in ready]
    model, flops = f"BERT-base, {length} tokens", partial(FLOPS["bert"], base)
    variants = {"headrace": run, "headrace, layers not fused": apart}
    return Contest(model, "tokens", ready, lengths, flops, variants, device_clock(engine), least=4 * size)


def small_batches(setting: Setting) -> Contest:
    """BERT-base on batches of 8 short texts, as a server gets them, with and without CUDA graphs."""
    folder = bert(setting.folder / "bert", setting.tiny)
    engine = registry.create("embed", folder, device=setting.device, dtype=setting.dtype, max_model_len=64)
    ready = [one.payload for one in engine.prepare(mixed(texts(setting.tiny))[:4_096])]
    graphs = engine.network.graphs

    def run(with_graphs: bool, some: Sequence[Any]) -> None:
        engine.network.graphs = graphs if with_graphs else None
        for start in range(0, len(some), 8):
            engine.forward(list(some[start : start + 8]))

    return Contest(
        "BERT-base, batches of 8",
        "tokens",
        ready,
        [one.shape[1] for one in ready],
        partial(FLOPS["bert"], engine.network.module[0].model),
        {"headrace": partial(run, True), "headrace, eager": partial(run, False)},
        device_clock(engine),
        least=512,
    )


def images(setting: Setting) -> Contest:
    """ViT-B/16 on JPEG files, decoding included."""
    from transformers import pipeline

    folder = vit(setting.folder / "vit", setting.tiny)
    files = photographs(setting.folder, setting.tiny)
    ours = Jobs(headrace.load("image-classify", folder, device=setting.device, dtype=setting.dtype), "image")
    peer = pipeline(
        "image-classification", str(folder), device=setting.device, dtype=getattr(torch, setting.dtype), top_k=1
    )
    name = f"{version('transformers')} pipeline"
    return Contest(
        "ViT-B/16",
        "images",
        files,
        [1] * len(files),
        partial(FLOPS["vit"], peer.model),
        {
            "headrace": ours,
            f"{name}, batch_size=64": lambda some: list(peer(list(some), batch_size=64)),
            f"{name}, one by one": lambda some: list(peer(list(some))),
        },
        lambda: ours.computed_s,
        least=128,
    )


def generation(setting: Setting) -> Contest:
    """Qwen2.5-7B shapes, prompts of mixed length and answers of long-tailed lengths, greedy."""
    folder, requests = qwen(setting.folder / "qwen", setting), prompts(setting.tiny)
    slots = 8 if setting.tiny else 128
    engine = registry.create(
        "generate", folder, device=setting.device, dtype=setting.dtype, max_num_seqs=slots, max_model_len=1024
    )
    asks = [prepared.payload for prepared in engine.prepare(requests)]
    answers = [ask.sampling.max_tokens for ask in asks]
    average = sum(len(ask.prompt) for ask in asks) / sum(answers)
    model = engine._lm.model  # one copy of the weights is enough for both
    attention = model.config._attn_implementation

    def launched(some: Sequence[Any]) -> None:
        engine._graphs = None
        continuous(engine, some, attention)

    return Contest(
        "Qwen2.5-7B",
        "answer tokens",
        asks,
        answers,
        lambda some: FLOPS["qwen"](model, [round(count * (1 + average)) for count in some]),
        {
            f"headrace, continuous, {slots} slots": lambda some: continuous(engine, some, attention),
            "headrace, each kernel launched": launched,
            **{
                f"{version('transformers')}, generate, batches of {size}": partial(static, model, size=size)
                for size in (slots, 16)
            },
        },
        step_clock(engine),
        least=slots,
        fewer={f"{version('transformers')}, generate, batches of 16": 16},
    )


def on_vllm(setting: Setting) -> Contest:
    """The same model and prompts on vLLM, through Headrace and by itself. Each has the device for itself."""
    import vllm

    folder, requests = qwen(setting.folder / "qwen", setting), prompts(setting.tiny)
    sizes = {"max_num_seqs": 128, "max_model_len": 1024, "dtype": setting.dtype}

    def ours(some: Sequence[Any]) -> None:
        rows = [{"id": str(number), **ask} for number, ask in enumerate(some)]
        headrace.run(rows, str(folder), sink=drop, task="generate", engine="vllm", progress=False, **sizes)

    peers: list[Any] = []

    def alone(some: Sequence[Any]) -> None:
        if not peers:
            peers.append(vllm.LLM(str(folder), **sizes))
        sampling = [vllm.SamplingParams(temperature=0, max_tokens=ask["max_tokens"], ignore_eos=True) for ask in some]
        peers[0].generate([ask["prompt"] for ask in some], sampling, use_tqdm=False)

    return Contest(
        "Qwen2.5-7B",
        "answer tokens",
        requests,
        [ask["max_tokens"] for ask in requests],
        lambda _: 0.0,
        {"headrace, vllm, loading included": ours, f"{version('vllm')}, LLM.generate": alone},
        lambda: 0.0,
        least=len(requests),
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
    "vllm": on_vllm,
}
