"""The arguments that `headrace tune` found for vLLM, which later jobs start it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.app.jobs.budgets import kept_steps, own_version, steps_in
from headrace.device.cache import TuningCache, cpu_facts
from headrace.device.cuda import cuda_devices
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.vllm.options import VllmGeneration

_SIZES = ("max_num_seqs", "max_num_batched_tokens")
"""Those for the size of a step: answers and tokens."""
ADDITIONS: Mapping[str, Mapping[str, object]] = {
    "n-gram speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    },
    "8-bit key-value cache": {"kv_cache_dtype": "fp8"},
}
"""What may make it faster, or slower, and may change an answer. N-grams suit answers that repeat their prompts."""


def keep(
    config: EngineConfig, size: StepSize, additions: Mapping[str, object], cache: TuningCache | None = None
) -> None:
    """Keep the best size and the additions that stayed, for later jobs with these options on this machine."""
    (cache or TuningCache()).write(_key(config), {**kept_steps(size), "additions": dict(additions)})


def found_size(config: EngineConfig, cache: TuningCache | None = None) -> StepSize | None:
    """The best size of vLLM's steps for this job; None if nothing was found, or if the user has set a size."""
    return steps_in(_kept(config, cache))


def found_arguments(
    config: EngineConfig, started: Mapping[str, object] | None = None, cache: TuningCache | None = None
) -> dict[str, object]:
    """What vLLM is to start with beside the user's options.

    Additions may change an answer: a resumed job keeps those that it has, and a job that draws its answers has none.

    Args:
        started: what the engine of a resumed job said of itself when the job began.
    """
    kept = _kept(config, cache)
    size, additions = steps_in(kept), kept.get("additions")
    sizes: dict[str, object] = {} if size is None else as_arguments(size)
    if started is not None:
        return sizes | _additions_of(config, started)
    if config.engine_options.get("temperature") or not isinstance(additions, dict):
        return sizes
    return sizes | additions


def as_arguments(size: StepSize) -> dict[str, object]:
    """vLLM's arguments for a size of its steps."""
    return dict(zip(_SIZES, (size.answers, size.tokens), strict=True))


def with_arguments(config: EngineConfig, arguments: Mapping[str, object]) -> EngineConfig:
    """The same engine with these options too."""
    return replace(config, engine_options={**config.engine_options, **arguments})


def _kept(config: EngineConfig, cache: TuningCache | None) -> Mapping[str, object]:
    is_set = any(config.engine_options.get(name) is not None for name in _SIZES)
    if is_set or (config.engine, config.task) != ("vllm", "generate"):
        return {}
    return (cache or TuningCache()).read(_key(config)) or {}


def _additions_of(config: EngineConfig, started: Mapping[str, object]) -> dict[str, object]:
    """The additions that a job began with, without those that its user sets now."""
    then, now = started.get("options"), config.engine_options
    if (config.engine, config.task) != ("vllm", "generate") or not isinstance(then, Mapping):
        return {}
    every = [pair for addition in ADDITIONS.values() for pair in addition.items()]
    return {name: value for name, value in every if then.get(name) == value and now.get(name) is None}


def _key(config: EngineConfig) -> dict[str, object]:
    """What the best arguments depend on, known before vLLM starts."""
    given = VllmGeneration.of(config.model, config.engine_options).engine_args()
    return {
        "task": config.task,
        "engine": "vllm",
        "model": str(config.model),
        "arguments": {name: str(value) for name, value in given.items() if name not in _SIZES},
        "devices": cuda_devices(),
        "headrace": own_version(),
        **cpu_facts(),
    }
