"""Many questions about each of many documents through vLLM on a CPU, with its prefix caching, in its environment.

.venv-vllm/bin/python -m benchmarks.prefixes_vllm    # or scripts/bench prefixes_vllm; about three minutes
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# One core for the model; nothing sent anywhere.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from headrace.engines.vllm.engine import VllmEngine  # first: it tells vLLM to be quiet
from headrace.engines.vllm.options import VllmGeneration

# isort: split
import vllm
from transformers import AutoTokenizer

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.prefixes import ANSWER, DOCUMENT, SLOTS, Outcome, Size, equal, least, model_folder, prompts
from headrace.app.jobs import job as jobs
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings

SIZE = Size(documents=8, questions=4, cache=2_048, rounds=1) if quick() else Size(64, 8, 8_192, 3)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1_024,
    "max_num_seqs": SLOTS,
    "block_size": 32,
    "num_gpu_blocks_override": SIZE.cache // 32,  # also on a CPU
}


def whole_list(model: vllm.LLM, texts: Sequence[str]) -> Outcome:
    """`LLM.generate` of all prompts, in the order given."""
    params = vllm.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    outputs = model.generate(list(texts), params, use_tqdm=False)
    computed = sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)
    return Outcome([output.outputs[0].text for output in outputs], computed)


def job(engine: VllmEngine, folder: Path, texts: Sequence[str]) -> Outcome:
    """A bulk job over the prompts, in the order that it chooses, from reading them to the output file."""
    before = engine.prefix_cache_stats()
    with tempfile.TemporaryDirectory() as place:
        sink = Path(place, "out.jsonl")
        config = EngineConfig(task="generate", engine="vllm", model=str(folder))
        plan = jobs.check(JobSettings([{"text": text} for text in texts], sink, config))
        main_path.run(jobs.build(plan, engine, StopRequest(), lambda _: None))
        answers = [json.loads(line)["generation"]["text"] for line in sink.open()]
    return Outcome(answers, engine.prefix_cache_stats().since(before).computed)


def main() -> None:
    """Measure both in turn and print the table."""
    shuffled = prompts(SIZE)
    random.Random(1).shuffle(shuffled)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        words = AutoTokenizer.from_pretrained(folder)
        tokens = [tuple(words(text).input_ids) for text in shuffled]
        caching = vllm.LLM(str(folder), disable_log_stats=True, enable_prefix_caching=True, **OPTIONS)
        engine = VllmEngine(VllmGeneration(model=folder, chat=False, max_tokens=ANSWER, ignore_eos=True, **OPTIONS))
        peer = f"vllm {vllm.__version__}, LLM.generate, prefix caching"
        runs: dict[str, Callable[[], Outcome]] = {
            peer: partial(whole_list, caching, shuffled),
            "headrace run --engine vllm": partial(job, engine, folder, shuffled),
        }
        outcomes: dict[str, Outcome] = {}

        def seconds(variant: str) -> float:
            engine._core.run_now(lambda core, _: core.reset_prefix_cache())
            caching.reset_prefix_cache()
            started = time.perf_counter()
            outcomes[variant] = runs[variant]()
            took = time.perf_counter() - started
            print(f"{variant}: {took:.1f} s", file=sys.stderr, flush=True)
            return took

        figures = rounds(SIZE.rounds, {variant: partial(seconds, variant) for variant in runs})
        engine.close()
    reference, fewest = outcomes[peer].answers, least(tokens)
    rows = [
        [
            variant,
            len(shuffled) * ANSWER / statistics.median(times),
            ratio(figures[peer], times),
            outcomes[variant].computed,
            outcomes[variant].computed / fewest,
            equal(outcomes[variant].answers, reference),
        ]
        for variant, times in figures.items()
    ]
    report(
        "prefixes-vllm",
        f"{SIZE.questions} questions about each of {SIZE.documents} documents through vLLM on a CPU, shuffled",
        [
            "variant",
            "tokens/s",
            "x LLM.generate",
            "prompt tokens computed",
            "x the fewest possible",
            "equal to the first",
        ],
        rows,
        [
            (
                f"Documents of {DOCUMENT} tokens, questions of 8 to 24, answers of {ANSWER}; a cache of {SIZE.cache:,} "
                f"tokens; {sum(map(len, tokens)):,} prompt tokens sent, at least {fewest:,} to compute; a Llama of 4 M "
                f"random weights, float32, one core for the model, greedy. Rounds: {SIZE.rounds}."
            )
        ],
    )


if __name__ == "__main__":
    main()
