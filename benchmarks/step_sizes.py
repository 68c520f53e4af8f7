"""What a job finds for the steps of a language model, beside the best of a grid of fixed sizes and the default.

python -m benchmarks.step_sizes
python -m benchmarks.step_sizes --minutes 4   # and again, until the table is complete
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache as cache_result
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.common import Parts, quick, ratio, report
from headrace import ContinuousBatcher
from headrace.app.jobs.budgets import follow_steps
from headrace.device.cache import TuningCache
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.events import Listener

ANSWERS, TOKENS = (32, 64, 128, 256), (512, 2048)
DEFAULT, MOST = StepSize(64, 512), StepSize(256, 4_096)
ROUNDS = 3
KINDS = ("short", "long", "shared")
PROMPTS: Mapping[str, int] = {"0.1 M": 240, "0.4 M": 200, "1 M": 160}
DEFAULT_NAME, BEST, FIRST, KEPT = "default", "best", "first job", "next job"


def model_folder(name: str, folder: Path) -> Path:
    """A model of random weights, which goes on talking for ever."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(ARITHMETIC)
    shared: dict[str, Any] = {
        "vocab_size": len(words), "max_position_embeddings": 2048, "initializer_range": 0.1, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    model: PreTrainedModel
    if name == "1 M":
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = Qwen3ForCausalLM(Qwen3Config(**shared, **sizes, num_key_value_heads=2, head_dim=32))
    else:
        hidden, layers = (64, 2) if name == "0.1 M" else (96, 4)
        sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
        model = LlamaForCausalLM(LlamaConfig(**shared, **sizes, num_attention_heads=4))
    model.save_pretrained(folder / name)
    words.save_pretrained(folder / name)
    return folder / name


def requests(kind: str, count: int) -> list[dict[str, Any]]:
    """Short prompts with long-tailed answers, long prompts with short answers, or prompts that begin alike."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghij +=0123456789", k=length))

    head, found = text(400), []
    for _ in range(count):
        prompt, length = text(rng.randint(10, 60)), min(max(round(rng.lognormvariate(3.3, 1.1)), 4), 256)
        if kind == "long":
            prompt, length = text(rng.randint(200, 900)), rng.randint(4, 16)
        elif kind == "shared":
            prompt, length = head + prompt, rng.randint(8, 40)
        found.append({"prompt": prompt, "max_tokens": length, "ignore_eos": True})
    return found


def seconds(engine: GenerationEngine, asks: Sequence[Any], size: StepSize | None, cache: TuningCache) -> float:
    """Processor time of these requests in steps of a fixed size, or of the size that a job finds."""
    engine.forget()  # without the prompts of the run before
    engine.steps = StepTuner(size or DEFAULT, size or MOST)

    async def run() -> None:
        heard: list[Listener] = []
        batcher: ContinuousBatcher[Any, Any] = ContinuousBatcher(
            engine,
            max_slots=engine.steps.slots,
            max_cost=engine.profile.max_cost,
            max_queue_size=512,
            listener=lambda event: [listener(event) for listener in heard] and None,
        )
        listener = None if size else follow_steps(EngineConfig(task="generate"), engine, batcher, lambda _: None, cache)
        heard += [] if listener is None else [listener]
        async with batcher:
            async for _ in batcher.map(asks):
                pass
        if listener is not None:
            listener.keep()

    started = time.process_time()
    asyncio.run(run())
    return time.process_time() - started


def main() -> None:
    """Measure all points in turn and print the table."""
    torch.set_num_threads(1)
    parts, rows = Parts("step_sizes"), list[list[Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for name, count in PROMPTS.items():
            engine = GenerationEngine(Generation(model=model_folder(name, Path(temporary)), device="cpu"))
            for kind in KINDS:
                inputs = requests(kind, count // 10 if quick() else count)
                asks = [one.payload for one in engine.prepare(inputs) if not isinstance(one, Exception)]
                rows.append([name, kind, *compared(parts, f"{name} {kind} ", partial(seconds, engine, asks))])
            engine.close()
    parts.done()
    counts = ", ".join(f"{count} prompts for {name}" for name, count in PROMPTS.items())
    note = (
        f"Models of random weights, float32, one thread, {counts}; speed by processor time as a share of that of the "
        f"grid's best, the median of {ROUNDS} pairs. Short: prompts of 10 to 60 tokens, answers of 4 to 256; long: 200 "
        "to 900 and 4 to 16; shared: 400 that all have in common, and 8 to 40. The grid has "
        f"{' '.join(map(str, ANSWERS))} answers and {' '.join(map(str, TOKENS))} tokens a step. The next job knows "
        "what an earlier one has kept."
    )
    columns = ["model", "prompts", "best (answers, tokens)", "default", "first job", "next job"]
    report("step_sizes", "Sizes of steps that a job finds, and the best of a grid", columns, rows, [note])


def compared(parts: Parts, label: str, point: Callable[[StepSize | None, TuningCache], float]) -> list[Any]:
    """The best of the grid, and the speeds of the others as shares of its speed."""
    with tempfile.TemporaryDirectory() as folder:
        unused, cache = TuningCache(Path(folder, "unused")), TuningCache(Path(folder, "kept"))
        warm = cache_result(lambda: point(DEFAULT, unused))  # the first steps are slower
        learn = cache_result(lambda: point(None, cache))  # keeps what it finds

        def after(ready: Callable[[], float], *given: Any) -> float:
            ready()
            return point(*given)

        sizes = [(a, t) for a in (ANSWERS[1:3] if quick() else ANSWERS) for t in TOKENS]
        took = {
            f"{a} {t}": parts.once(f"{label}{a} {t}", partial(after, warm, StepSize(a, t), unused)) for a, t in sizes
        }
        best = min(took, key=lambda one: took[one])
        answers, tokens = map(int, best.split())
        variants = {
            label + BEST: partial(after, warm, StepSize(answers, tokens), unused),
            label + DEFAULT_NAME: partial(after, warm, DEFAULT, unused),
            label + FIRST: lambda: after(warm, None, TuningCache(Path(tempfile.mkdtemp(dir=folder)))),
            label + KEPT: partial(after, learn, None, cache),
        }
        found = parts.rounds(1 if quick() else ROUNDS, variants)
    own = [ratio(found[label + BEST], found[label + one]) for one in (DEFAULT_NAME, FIRST, KEPT)]
    return [best, *own]


if __name__ == "__main__":
    main()
