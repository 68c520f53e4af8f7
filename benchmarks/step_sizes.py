"""What a job finds for the steps of a language model, beside the best of a grid of fixed sizes and the default.

python -m benchmarks.step_sizes
python -m benchmarks.step_sizes --minutes 4   # and again, until the table is complete
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
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

from benchmarks.common import Parts, quick, report
from headrace import ContinuousBatcher
from headrace.app.jobs.budgets import StepListener, follow_steps
from headrace.device.cache import TuningCache
from headrace.device.step_sizes import StepSize, StepTuner
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.engines.requests.generation import GeneratedText

ANSWERS, TOKENS = (32, 64, 128, 256), (512, 2048)
DEFAULT, MOST = StepSize(64, 512), StepSize(256, 4_096)
TURN_S = 0.05
ROUNDS = 3
KINDS = ("short", "long", "shared")
PROMPTS: Mapping[str, int] = {"0.1 M": 240, "0.4 M": 200, "1 M": 160}
GRID = [StepSize(a, t) for a in (ANSWERS[1:3] if quick() else ANSWERS) for t in TOKENS]
OTHERS = ("best again", "default", "first job", "next job")


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


class Turns:
    """Jobs that compute in turn, each for a moment: what disturbs the machine disturbs them all.

    Args:
        count: how many jobs. The first turn begins when all of them have a step to run.
    """

    def __init__(self, count: int) -> None:
        self.used = [0.0] * count
        """Processor time of each, in seconds."""
        self._absent = set(range(count))
        self._turns = list(range(count))
        """The jobs that compute, the next one first."""
        self._changed = threading.Condition()
        self._since = 0.0

    def step(self, job: int, step: Callable[[], Any]) -> Any:
        """Run a step of a job in its turn, on the thread of its engine."""
        with self._changed:
            if job in self._absent:
                self._absent.discard(job)
                self._since = time.process_time()
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._absent and self._turns[0] == job)
        done = step()
        if time.process_time() - self._since > TURN_S:
            self._end(job, [job])
        return done

    def leave(self, job: int) -> None:
        """The job has no more steps."""
        if self._turns[0] == job:
            self._end(job, [])
        else:
            self._turns.remove(job)

    def _end(self, job: int, again: list[int]) -> None:
        with self._changed:
            now = time.process_time()
            self.used[job] += now - self._since
            self._since, self._turns = now, [*self._turns[1:], *again]
            self._changed.notify_all()


class EngineInTurn(GenerationEngine):
    """An engine whose steps wait for their turn."""

    turn: tuple[Turns, int] | None = None

    def step(self) -> list[tuple[int, GeneratedText | Exception]]:
        if self.turn is None:
            return super().step()
        turns, job = self.turn
        found: list[tuple[int, GeneratedText | Exception]] = turns.step(job, super().step)
        return found


Run = StepSize | TuningCache
"""A fixed size of steps, or what earlier jobs have kept for a job that finds it."""


def seconds(engines: Sequence[EngineInTurn], asks: Sequence[Any], runs: Sequence[Run]) -> list[float]:
    """Processor time of these requests in each run."""
    turns = Turns(len(runs))

    async def answer(engine: EngineInTurn, job: int, run: Run) -> None:
        engine.forget()  # without the prompts of the run before
        engine.steps = StepTuner(DEFAULT, MOST) if isinstance(run, TuningCache) else StepTuner(run, run)
        engine.turn = turns, job
        heard: list[StepListener] = []
        batcher: ContinuousBatcher[Any, Any] = ContinuousBatcher(
            engine,
            max_slots=engine.steps.slots,
            max_cost=engine.profile.max_cost,
            max_queue_size=512,
            listener=lambda event: heard[0](event) if heard else None,
        )
        if isinstance(run, TuningCache):
            listener = follow_steps(EngineConfig(task="generate"), engine, batcher, lambda _: None, run)
            assert listener is not None, "the engine has steps"
            heard.append(listener)
        async with batcher:
            async for _ in batcher.map(asks):
                pass
        turns.leave(job)
        for listener in heard:
            listener.keep()

    async def answer_all() -> None:
        await asyncio.gather(*(answer(engines[job], job, run) for job, run in enumerate(runs)))

    asyncio.run(answer_all())
    return turns.used


def main() -> None:
    """Measure all points in turn and print the table."""
    torch.set_num_threads(1)
    parts, rows = Parts("step_sizes"), list[list[Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for name, count in PROMPTS.items():
            options = Generation(model=model_folder(name, Path(temporary)), device="cpu")
            engines = [EngineInTurn(options) for _ in range(max(len(GRID), 1 + len(OTHERS)))]
            for kind in KINDS:
                inputs = requests(kind, count // 10 if quick() else count)
                asks = [one.payload for one in engines[0].prepare(inputs) if not isinstance(one, Exception)]
                rows.append([name, kind, *compared(parts, f"{name} {kind} ", engines, asks)])
            for engine in engines:
                engine.close()
    parts.done()
    counts = ", ".join(f"{count} prompts for {name}" for name, count in PROMPTS.items())
    note = (
        f"Models of random weights, float32, one thread, {counts}; speed by processor time of {ROUNDS} rounds as a "
        "share of that of the grid's best. The jobs of a round compute in turn, each for a moment; what the best has "
        "when it runs twice is noise. Short: prompts of 10 to 60 tokens, answers of 4 to 256; long: 200 to 900 and 4 "
        "to 16; shared: 400 that all have in common, and 8 to 40. The grid has "
        f"{' '.join(map(str, ANSWERS))} answers and {' '.join(map(str, TOKENS))} tokens a step. The next job knows "
        "what an earlier one has kept."
    )
    columns = ["model", "prompts", "best (answers, tokens)", *OTHERS]
    report("step_sizes", "Sizes of steps that a job finds, and the best of a grid", columns, rows, [note])


def compared(parts: Parts, label: str, engines: Sequence[EngineInTurn], asks: Sequence[Any]) -> list[Any]:
    """The best of the grid, and the speeds of the others as shares of its speed."""
    with tempfile.TemporaryDirectory() as folder:
        kept = TuningCache(Path(folder))
        warm = cache_result(lambda: seconds(engines, asks, [DEFAULT] * len(engines)))  # memory is slower when new
        learn = cache_result(lambda: (warm(), seconds(engines, asks, [kept])))

        def once(ready: Callable[[], Any], runs: Sequence[Run | None]) -> list[float]:
            ready()
            with tempfile.TemporaryDirectory() as empty:
                return seconds(engines, asks, [TuningCache(Path(empty)) if run is None else run for run in runs])

        def measured(name: str, ready: Callable[[], Any], runs: Sequence[Run | None]) -> list[float]:
            """Processor time of each run in all rounds, of which each gives the runs other engines; None: a new job."""
            sums = [0.0] * len(runs)
            for number in range(1 if quick() else ROUNDS):
                order = [(number + place) % len(runs) for place in range(len(runs))]
                took = parts.once(label + name, partial(once, ready, [runs[run] for run in order]))
                for run, one in zip(order, took, strict=True):
                    sums[run] += one
            return sums

        took = measured("grid", warm, GRID)
        best = GRID[took.index(min(took))]
        own, *others = measured("jobs", learn, [best, best, DEFAULT, None, kept])
    return [f"{best.answers} {best.tokens}", *(own / other for other in others)]


if __name__ == "__main__":
    main()
