"""What `headrace tune` keeps for vLLM, and which jobs start it so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.app.jobs.vllm_arguments import ADDITIONS, found_arguments, found_size, keep, with_arguments
from headrace.device.cache import TuningCache
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing.config import EngineConfig

SIZE = StepSize(512, 4_096)
SIZES = {"max_num_seqs": 512, "max_num_batched_tokens": 4_096}
NGRAM = dict(ADDITIONS["n-gram speculation"])
CONFIG = EngineConfig("generate", "a/model", "vllm", {"dtype": "float32", "max_tokens": 8})


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    cache = TuningCache(tmp_path)
    keep(CONFIG, SIZE, NGRAM, cache)
    return cache


def test_a_job_starts_vllm_with_what_was_kept(cache: TuningCache) -> None:
    longer = with_arguments(CONFIG, {"max_tokens": 9})
    for config in (CONFIG, longer):
        assert found_size(config, cache) == SIZE
        assert found_arguments(config, None, cache) == SIZES | NGRAM
    assert with_arguments(CONFIG, SIZES).engine_options == {"dtype": "float32", "max_tokens": 8, **SIZES}


@pytest.mark.parametrize(
    "other",
    [
        with_arguments(CONFIG, {"dtype": "bfloat16"}),
        with_arguments(CONFIG, {"max_num_seqs": 8}),
        with_arguments(CONFIG, {"speculative_config": {"method": "suffix"}}),
        replace(CONFIG, engine="torch"),
        replace(CONFIG, model="another/model"),
    ],
)
def test_another_job_does_not(cache: TuningCache, other: EngineConfig) -> None:
    assert found_size(other, cache) is None and found_arguments(other, None, cache) == {}


def test_a_job_that_draws_its_answers_takes_the_size_alone(cache: TuningCache) -> None:
    drawing = with_arguments(CONFIG, {"temperature": 0.7, "seed": 1})
    keep(drawing, SIZE, NGRAM, cache)
    assert found_arguments(drawing, None, cache) == SIZES


def test_a_resumed_job_keeps_what_it_began_with(cache: TuningCache) -> None:
    assert found_arguments(CONFIG, {"options": {"dtype": "float32"}}, cache) == SIZES
    cache8 = dict(ADDITIONS["8-bit key-value cache"])
    assert found_arguments(CONFIG, {"options": cache8}, cache) == SIZES | cache8
    keep(CONFIG, SIZE, {}, cache)
    assert found_arguments(CONFIG, {"options": {**NGRAM, "dtype": "float32"}}, cache) == SIZES | NGRAM
    assert found_arguments(CONFIG, {"engine": "vllm"}, cache) == SIZES


def test_what_the_user_sets_stays(cache: TuningCache) -> None:
    own = with_arguments(CONFIG, {"kv_cache_dtype": "auto"})
    began = {"options": {"kv_cache_dtype": "fp8", "speculative_config": {"method": "suffix"}}}
    assert found_arguments(own, began, cache) == {}, "the engine tells that they differ"
    assert found_arguments(replace(CONFIG, engine="torch"), began, cache) == {}
