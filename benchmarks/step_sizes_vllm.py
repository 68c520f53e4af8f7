"""What `headrace tune` picks for vLLM on a CPU, beside the best of a full grid and the default, in its environment.

.venv-vllm/bin/python -m benchmarks.step_sizes_vllm               # see scripts/install-vllm
.venv-vllm/bin/python -m benchmarks.step_sizes_vllm --minutes 9   # and again, until the table is complete
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

# One core for the model, one for what feeds it; nothing sent anywhere.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from headrace.engines.choosing.config import EngineConfig
from headrace.engines.vllm.engine import VllmEngine  # first: it tells vLLM to be quiet
from headrace.engines.vllm.options import VllmGeneration

# isort: split
import psutil
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.common import Parts, new_cache, quick, report
from benchmarks.step_sizes import KINDS, requests
from headrace.app import step_grid
from headrace.app.jobs import job as wiring
from headrace.device.step_sizes import StepSize
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import ReportBuilder

DEFAULT, MOST = StepSize(128, 2_048), StepSize(512, 8_192)
GRID = list(itertools.starmap(StepSize, itertools.product(*step_grid._OF_VLLM)))
PROMPTS = {kind: 24 if quick() else count for kind, count in {"short": 192, "long": 72, "shared": 192}.items()}
ROUNDS = 1 if quick() else 2
OPTIONS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1_024, "chat": False}
SHARED: dict[str, Any] = {"max_position_embeddings": 1_024, "eos_token_id": 1, "pad_token_id": 0}
SIZE = "HEADRACE_BENCHMARK_STEP_SIZE"
"""The variable with the path of the file from which vLLM's process takes the size of its steps."""
SIZES = "max_num_seqs", "max_num_batched_tokens"
SCHEDULER = "benchmarks.step_sizes_vllm.SizedScheduler"


def networks(words: int) -> dict[str, PreTrainedModel]:
    """Three architectures of random weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    opt = {"hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 768, "num_hidden_layers": 4}
    far = {"vocab_size": words, **SHARED, "initializer_range": 0.1}
    torch.manual_seed(0)
    return {
        "Llama": LlamaForCausalLM(LlamaConfig(**far, **sizes, num_hidden_layers=6)),
        "Qwen3": Qwen3ForCausalLM(Qwen3Config(**far, **sizes, num_hidden_layers=4, num_key_value_heads=2, head_dim=32)),
        "OPT": OPTForCausalLM(OPTConfig(vocab_size=words, **SHARED, init_std=0.1, num_attention_heads=3, **opt)),
    }


def saved_networks(folder: Path) -> Iterator[tuple[str, Path, PreTrainedModel]]:
    """The name of each, its folder, and itself."""
    words = AutoTokenizer.from_pretrained(ARITHMETIC)
    for name, network in networks(len(words)).items():
        network.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
        yield name, folder / name, network


def written(folder: Path, kind: str, count: int) -> Path:
    """A file of so many prompts."""
    source = folder / f"{kind}.jsonl"
    source.write_text("".join(json.dumps({"prompt": ask}) + "\n" for ask in requests(kind, count)))
    return source


class SizedScheduler(AsyncScheduler):
    """Takes the size of its steps from a file before a job, so that sizes run in turn: vLLM starts but once."""

    def schedule(self, *args: Any, **named: Any) -> Any:
        if not self.running:
            answers, self.max_num_scheduled_tokens = json.loads(Path(os.environ[SIZE]).read_text())
            self.max_num_running_reqs = self.max_num_active_reqs = answers
        return super().schedule(*args, **named)


def processor_time() -> float:
    """Of vLLM's process with the model, which has a core of its own and waits without sleeping."""
    running = (one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE)
    return sum(sum(one.cpu_times()[:2]) for one in running if one.cmdline()[:1] == ["VLLM::Worker"])


class LastingEngine(VllmEngine):
    """Goes on when what has loaded it closes it: vLLM starts for half a minute."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


class Sized:
    """vLLM with a model, whose jobs each have a size of steps. It starts when it is needed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._file = model, folder / "size.json"
        self._engine: LastingEngine | None = None

    def engine(self, source: Path, size: StepSize) -> LastingEngine:
        """With steps of this size, and without the prompts of the run before."""
        os.environ[SIZE] = str(self._file)
        whole = self._file.with_suffix(".new")
        whole.write_text(json.dumps(astuple(size)))
        whole.replace(self._file)  # a step may be reading it
        if self._engine is None:
            most = {"scheduler_cls": SCHEDULER, **dict(zip(SIZES, astuple(MOST), strict=True))}
            self._engine = LastingEngine(VllmGeneration.of(self._model, {**OPTIONS, **most}))
            self.seconds(source, size)  # memory is slower when new
        ahead = size.answers + max(size.answers // 4, 16)  # as `VllmCore` has it
        self._engine.profile = replace(self._engine.profile, max_in_flight=ahead)
        self._engine._core.run_now(lambda engine, _: engine.reset_prefix_cache())
        return self._engine

    def settings(self, source: Path, sink: Any) -> JobSettings:
        config = EngineConfig("generate", str(self._model), "vllm", OPTIONS)
        return JobSettings(source, sink, config, text_column="prompt", overwrite=isinstance(sink, Path))

    def seconds(self, source: Path, size: StepSize) -> float:
        """Of the core that computes, for the whole way from file to file at this size of steps."""
        plan = wiring.check(self.settings(source, source.with_suffix(".out.jsonl")))
        job = wiring.build(plan, self.engine(source, size), StopRequest(), ReportBuilder())
        before = processor_time()
        end = main_path.run(job)
        assert not end.failed, f"{size} answers all"
        return processor_time() - before

    def tuned(self, source: Path) -> list[int]:
        """What `headrace tune` picks, as a user would call it, and how many sizes it has tried."""

        def loaded(config: EngineConfig) -> LastingEngine:
            options = config.engine_options
            return self.engine(source, StepSize(*map(options.__getitem__, SIZES)))

        with new_cache(), patch.multiple(step_grid, load_engine=loaded, ADDITIONS={}):
            grid = step_grid.measure_steps(self.settings(source, [].extend), 60)
        return [grid.chosen.size.answers, grid.chosen.size.tokens, len(grid.rows)]

    def end(self) -> None:
        if self._engine is not None:
            self._engine.end()


def named(size: StepSize) -> str:
    return f"{size.answers} {size.tokens}"


def compared(parts: Parts, label: str, vllm: Sized, source: Path) -> list[Any]:
    """The best of the grid, and the speeds of the default and of the size that is picked as shares of its speed."""

    def fastest(name: str, sizes: Mapping[str, StepSize]) -> dict[str, float]:
        runs = {f"{label} {name} {key}": partial(vllm.seconds, source, size) for key, size in sizes.items()}
        return dict(zip(sizes, map(min, parts.rounds(ROUNDS, runs).values()), strict=True))

    grid = fastest("grid", {named(size): size for size in GRID})
    best = GRID[list(grid.values()).index(min(grid.values()))]
    answers, tokens, tried = parts.once(f"{label} tune", partial(vllm.tuned, source))
    picked = StepSize(answers, tokens)
    sizes = {named(size): size for size in (best, DEFAULT, picked)}  # what is picked may be one of the others
    took = fastest("jobs", {**sizes, "again": best})
    again, default, tune = (took[named(best)] / took[name] for name in ("again", named(DEFAULT), named(picked)))
    rate = len(source.read_text().splitlines()) / took[named(best)]
    return [named(best), round(rate, 1), again, default, named(picked), tried, tune]


def main() -> None:
    """Measure all sizes in turn and print the table."""
    parts, rows = Parts("step_sizes_vllm"), list[list[Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, model, network in saved_networks(folder):
            vllm, label = Sized(model, folder), f"{name}, {network.num_parameters() / 1e6:.1f} M"
            for kind in KINDS:
                source = written(folder, kind, PROMPTS[kind])
                rows.append([label, kind, *compared(parts, f"{name} {kind}", vllm, source)])
            vllm.end()
    parts.done()
    counts = ", ".join(f"{count} {kind}" for kind, count in PROMPTS.items())
    grid = " and ".join(" ".join(map(str, sizes)) for sizes in step_grid._OF_VLLM)
    note = (
        f"Random weights, float32, prompts as in `benchmarks.step_sizes` ({counts}). Jobs from file to file, by the "
        f"seconds of the core that computes, as shares of the best's speed: the faster of {ROUNDS} rounds in turn, as "
        f"for the grid of {grid} answers and tokens. What the best has when it runs again is noise. The default is "
        f"{named(DEFAULT)}. All sizes run in one vLLM, also for the tuning; `headrace tune` starts it anew for each."
    )
    columns = [
        "model", "prompts", "best (answers, tokens)", "its records/s", "best again", "default",
        "picked by tune", "of sizes", "its speed",
    ]  # fmt: skip
    report("step_sizes_vllm", "Sizes of vLLM's steps that tuning finds, and the best of a grid", columns, rows, [note])


if __name__ == "__main__":
    main()
