"""Typed options of all engines, for editors and type checkers. Each engine validates its own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters, as in `headrace.engines.requests.Sampling`."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str]
    seed: int | None
    ignore_eos: bool


class VllmOptions(TypedDict, total=False):
    """vLLM's most common engine arguments; pass others in `engine_options`."""

    compilation_config: Mapping[str, object]
    cpu_offload_gb: float
    data_parallel_size: int
    enable_chunked_prefill: bool
    enable_lora: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    gpu_memory_utilization: float
    hf_overrides: Mapping[str, object]
    kv_cache_dtype: str
    limit_mm_per_prompt: Mapping[str, int]
    load_format: str
    max_num_batched_tokens: int
    pipeline_parallel_size: int
    quantization: str
    speculative_config: Mapping[str, object]
    tensor_parallel_size: int
    tokenizer: str
    tokenizer_mode: str


VLLM_OPTIONS = frozenset(VllmOptions.__annotations__)


INT8 = "int8"
"""The value of `quantize`, and the dtype that an engine so quantised describes."""


class LocalOptions(SamplingOptions, VllmOptions, total=False):
    """Options of engines that run a model in this process."""

    chat: bool | None
    chunk_join: Literal["mean", "max"] | None
    chunk_overlap: int | None
    config: str | Path | None
    device: str
    dtype: str
    handler: str | Path
    hypothesis_template: str
    kv_cache_tokens: int | None
    labels: str | Sequence[str]
    max_active_dims: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_pixels: int
    multi_label: bool
    normalize: bool
    on_too_long: Literal["truncate", "error", "split"]
    output_dtype: Literal["float32", "int8", "uint8", "binary", "ubinary"]
    prompt: str | None
    prompt_name: str | None
    providers: Sequence[str]
    quantize: Literal["int8"] | None
    system_prompt: str | None
    top_labels: int | None
    truncate_dim: int | None
    trust_remote_code: bool


class EngineOptions(LocalOptions, total=False):
    """Options of all engines, including remote ones."""

    api_key: str | None
    attempts: int
    concurrency: int
    endpoints: Sequence[str]
