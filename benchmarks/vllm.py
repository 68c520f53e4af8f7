"""A bulk job through vLLM and vLLM's own `LLM.generate`, in its environment: answers of long-tailed lengths.

.venv-vllm/bin/python -m benchmarks.vllm                        # see scripts/install-vllm
.venv-vllm/bin/python -m benchmarks.vllm --gsm8k questions.jsonl  # real questions, counted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# One core for the model, one for what feeds it; nothing sent anywhere.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from headrace.engines.choosing.config import EngineConfig
from headrace.engines.vllm.engine import VllmEngine  # first: it tells vLLM to be quiet
from headrace.engines.vllm.options import VllmGeneration

# isort: split
import torch
import vllm
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from benchmarks.common import quick, ratio, report, rounds, version
from benchmarks.generation import STATIC, generate, model_folder, requests
from headrace.app.jobs import job as wiring
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.observe.reporting.report import ReportBuilder

ROUNDS = 1 if quick() else 12
OF_CHUNKS = 1 if quick() else 3
SLOTS = 64
CHUNK = 64
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": SLOTS,
    "enable_prefix_caching": False,  # the same prompts come again in every round
}
Asks = Sequence[dict[str, Any]]


class Ask:
    """A request as `benchmarks.generation.generate` takes it."""

    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        self.prompt = prompt
        self.sampling = argparse.Namespace(max_tokens=max_tokens)


def job(engine: VllmEngine, source: Path, column: str) -> tuple[int, list[dict[str, Any]]]:
    """The whole way from file to file; how many records failed, and the rows of the output."""
    sink = source.with_suffix(".out.jsonl")
    settings = wiring.JobSettings(
        source=source,
        sink=sink,
        text_column=column,
        overwrite=True,
        config=EngineConfig(task="generate", engine="vllm"),
    )
    end = main_path.run(wiring.build(wiring.check(settings), engine, StopRequest(), ReportBuilder()))
    return end.failed, [json.loads(line) for line in sink.read_text().splitlines()]


class Steps:
    """Counts how often the model has run: what keeps an engine full, whatever else the machine does."""

    def __init__(self, whole: vllm.LLM, engine: VllmEngine) -> None:
        self.count = 0
        step, core = whole.llm_engine.step, engine._core._engine.engine_core  # nothing public tells
        get = core.get_output_async

        def counted_step() -> Any:
            self.count += 1
            return step()

        async def counted_get() -> Any:
            self.count += 1
            return await get()

        whole.llm_engine.step, core.get_output_async = counted_step, counted_get


def headrace_job(engine: VllmEngine, source: Path) -> list[str]:
    """Texts in input order."""
    return [row["generation"]["text"] for row in job(engine, source, "prompt")[1]]


def llm(model: vllm.LLM, asks: Asks, chunk: int) -> list[str]:
    """`LLM.generate`, a chunk of prompts at a time."""
    answers: list[str] = []
    for start in range(0, len(asks), chunk):
        part = asks[start : start + chunk]
        params = [vllm.SamplingParams(temperature=0, max_tokens=ask["max_tokens"], ignore_eos=True) for ask in part]
        outputs = model.generate([ask["prompt"] for ask in part], params, use_tqdm=False)
        answers += [output.outputs[0].text for output in outputs]
    return answers


def static(model: Any, words: Any, asks: Asks) -> list[str]:
    """transformers' `generate` on padded batches as they come."""
    torch.set_num_threads(1)
    return generate(model, words, [Ask(words(ask["prompt"]).input_ids, ask["max_tokens"]) for ask in asks], STATIC)


def leave_core(core: int) -> None:
    """Keep every thread of this process, which only feeds, off the core that vLLM's model is bound to."""
    others = os.sched_getaffinity(0) - {core}
    for thread in Path("/proc/self/task").iterdir() if others else ():
        os.sched_setaffinity(int(thread.name), others)


def compare(folder: Path) -> None:
    """Measure all of them in turn and print the table."""
    asks = requests()
    source = folder / "requests.jsonl"
    source.write_text("".join(json.dumps({"prompt": ask}) + "\n" for ask in asks))
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain.generation_config = GenerationConfig()
    whole = vllm.LLM(str(folder), disable_log_stats=True, **OPTIONS)
    engine = VllmEngine(VllmGeneration(model=folder, chat=False, **OPTIONS))
    peer = f"vllm {vllm.__version__}, LLM.generate"
    ours = f"headrace, a job from file to file, at most {engine.profile.max_in_flight} under way"
    slow = f"{version('transformers')}, generate, batches of {STATIC}, one round"
    variants: dict[str, Callable[[], list[str]]] = {
        slow: partial(static, plain, AutoTokenizer.from_pretrained(folder), asks),
        f"{peer}, chunks of {CHUNK}": partial(llm, whole, asks, CHUNK),
        f"{peer}, the whole set": partial(llm, whole, asks, len(asks)),
        ours: partial(headrace_job, engine, source),
    }
    answers: dict[str, list[str]] = {}
    steps, taken = Steps(whole, engine), {}

    def seconds(name: str) -> float:
        started, before = time.perf_counter(), steps.count
        answers[name] = variants[name]()
        taken[name] = steps.count - before or "-"
        return time.perf_counter() - started

    llm(whole, asks[:8], 8)
    figures = {slow: [seconds(slow)]}
    leave_core(0)
    fast = {name: partial(seconds, name) for name in variants if name != slow}
    figures |= rounds(OF_CHUNKS, fast)
    del fast[f"{peer}, chunks of {CHUNK}"]
    for name, times in rounds(ROUNDS - OF_CHUNKS, fast).items():
        figures[name] += times
    engine.close()
    tokens = sum(ask["max_tokens"] for ask in asks)
    reference = answers[f"{peer}, the whole set"]
    rows = [
        [
            name,
            round(tokens / statistics.median(times)),
            ratio(times, figures[ours][: len(times)]),
            taken[name],
            f"{sum(a == b for a, b in zip(answers[name], reference, strict=True))} of {len(asks)}",
        ]
        for name, times in figures.items()
    ]
    report(
        "vllm",
        "A bulk job through vLLM on a CPU, answers of long-tailed lengths",
        ["variant", "tokens/s", "headrace is x times as fast", "steps of vLLM", "answers equal to the whole set's"],
        rows,
        [
            f"{len(asks)} prompts, {tokens:,} answer tokens, greedy; a Llama of 4 million random weights, float32.",
            f"{SLOTS} slots, one core for the model, the rest for what feeds it.",
            f"Medians of {ROUNDS} rounds, of {OF_CHUNKS} of the chunks, the variants in turn, there and back.",
        ],
    )


def count_gsm8k(questions: Path, folder: Path) -> None:
    """Every question through a job, and what became of each."""
    source = folder / "questions.jsonl"
    source.write_bytes(questions.read_bytes())
    engine = VllmEngine(VllmGeneration(model=folder, chat=False, max_tokens=64, **{**OPTIONS, "max_model_len": 1024}))
    started = time.perf_counter()
    failed, rows = job(engine, source, "question")
    took = time.perf_counter() - started
    engine.close()
    ids = {row["id"] for row in rows}
    counts = [row["generation"] for row in rows]
    report(
        "vllm-gsm8k",
        "gsm8k questions through vLLM",
        ["questions", "answered", "failed", "lost or doubled", "prompt tokens", "answer tokens", "seconds"],
        [
            [
                len(source.read_text().splitlines()),
                len(rows),
                failed,
                len(source.read_text().splitlines()) - len(ids) - failed + len(rows) - len(ids),
                sum(count["prompt_tokens"] for count in counts),
                sum(count["completion_tokens"] for count in counts),
                took,
            ]
        ],
        ["Random weights: the answers mean nothing, their number does."],
    )


def main() -> None:
    """The comparison, or with --gsm8k the count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gsm8k", type=Path, default=None, metavar="JSONL")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        if given.gsm8k is None:
            compare(folder)
        else:
            count_gsm8k(given.gsm8k, folder)


if __name__ == "__main__":
    main()
