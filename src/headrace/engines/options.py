"""Typed options of all engines, for editors and type checkers. Each engine validates its own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters, as in `headrace.engines.requests.generation.Sampling`."""

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


VLLM_OPTIONS = frozenset({*VllmOptions.__annotations__, "enforce_eager"})
"""With those that encoders have too."""


INT8 = "int8"
"""The value of `quantize`, and the dtype that an engine so quantised describes."""


class EncoderOptions(TypedDict, total=False):
    """Options of every engine for models of sentence-transformers."""

    device: str
    """"auto" (the default: CUDA if available), "cpu", "cuda" or "cuda:N"."""
    dtype: str
    """"auto" (the default: float32 on CPU, the weights' dtype on CUDA; a job may choose, see docs/tuning.md),
    "float32", "float16" or "bfloat16"."""
    enforce_eager: bool
    """Whether to do without CUDA graphs; without effect on a CPU."""
    max_model_len: int | None
    """In tokens; None for the model's limit."""
    on_too_long: Literal["truncate", "error", "split"]
    """Truncate a longer text (the default), fail its record, or split it into chunks."""
    chunk_overlap: int | None
    """Tokens that neighbouring chunks have in common; None for none."""
    chunk_join: Literal["mean", "max", "map-reduce", "first"] | None
    """How the outputs for the chunks become one; None for the default of the task."""
    prompt_name: str | None
    """Name of one of the model's prompts, which goes before each text; None for the model's default."""
    prompt: str | None
    """The same as text."""
    trust_remote_code: bool
    """Whether to run Python code from the model's folder."""


class LocalOptions(SamplingOptions, VllmOptions, EncoderOptions, total=False):
    """Options of engines that run a model in this process."""

    chat: bool | None
    config: str | Path | None
    handler: str | Path
    hypothesis_template: str
    kv_cache_tokens: int | None
    labels: str | Sequence[str]
    max_active_dims: int | None
    max_num_seqs: int
    max_pixels: int
    multi_label: bool
    no_answer: str | None
    normalize: bool
    output_dtype: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
    providers: Sequence[str]
    quantize: Literal["int8"] | None
    reduce_template: str | None
    system_prompt: str | None
    top_labels: int | None
    truncate_dim: int | None


class EngineOptions(LocalOptions, total=False):
    """Options of all engines, including remote ones."""

    api_key: str | None
    attempts: int
    concurrency: int
    endpoints: Sequence[str]
