"""The options of all engines as typed keywords. Written by scripts/engine_options.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from headrace.engines.options import ChunkJoin, OutputDtype, PixelsOption, Quantize, TooLong
    from headrace.engines.text.options import TokenVectorDtype


class LocalKeywords(TypedDict, total=False):
    """Options of engines that run a model in this process."""

    adapter: str | None
    adapters: Mapping[str, str] | None
    chat: bool | None
    chunk_join: ChunkJoin | Literal["map-reduce", "first"] | None
    chunk_overlap: int | None
    compilation_config: Mapping[str, object] | None
    config: str | Path | None
    cpu_offload_gb: float | None
    data_parallel_size: int | None
    device: str
    dtype: str | None
    enable_chunked_prefill: bool | None
    enable_lora: bool | None
    enable_prefix_caching: bool | None
    enforce_eager: bool
    examples: str | Sequence[Mapping[str, object]] | None
    frequency_penalty: float | None
    gpu_memory_utilization: float | None
    handler: str | Path | None
    hf_overrides: Mapping[str, object] | None
    hypothesis_template: str
    ignore_eos: bool | None
    kv_cache_dtype: str | None
    kv_cache_tokens: int | None
    labels: str | Sequence[str]
    limit_mm_per_prompt: Mapping[str, int] | None
    load_format: str | None
    max_active_dims: int | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_pixels: int
    max_tokens: int | None
    min_p: float | None
    min_tokens: int | None
    multi_label: bool
    no_answer: str | None
    normalize: bool
    on_too_long: TooLong | Literal["error", "split"] | None
    output_dtype: OutputDtype | TokenVectorDtype
    pipeline_parallel_size: int | None
    pixels: PixelsOption
    presence_penalty: float | None
    prompt: str | None
    prompt_name: str | None
    providers: Sequence[str]
    quantization: str | None
    quantize: Quantize
    reasoning_parser: str | None
    reduce_template: str | None
    repetition_penalty: float | None
    seed: int | None
    speculative_config: Mapping[str, object] | None
    stop: str | Sequence[str] | None
    system_prompt: str | None
    temperature: float | None
    tensor_parallel_size: int | None
    tokenizer: str | Path | None
    tokenizer_mode: str | None
    tool_call_parser: str | None
    tool_choice: str | None
    tools: str | Sequence[Mapping[str, object]] | None
    top_k: int | None
    top_labels: int | None
    top_p: float | None
    truncate_dim: int | None
    trust_remote_code: bool | None


class EngineKeywords(LocalKeywords, total=False):
    """Options of all engines; each refuses what it does not have."""

    api_key: str | None
    attempts: int
    concurrency: int
    endpoints: Sequence[str]
    extra_body: Mapping[str, object] | None
    requests_per_minute: float | None
    tokens_per_minute: float | None
