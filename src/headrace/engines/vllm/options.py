"""Engines on vLLM, declared. Arguments of vLLM itself are read from its source, without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Self

from headrace.argument_types import check_types
from headrace.engines.model_folder import DEFAULT_MODEL, WEIGHTS
from headrace.engines.options import (
    AnswerOptions,
    GraphOptions,
    LabelOptions,
    LongPromptOptions,
    NamedAdapterOptions,
    PromptOptions,
    SamplingOptions,
    TextOptions,
    VectorOptions,
)
from headrace.options import declared, option

AS_VLLM = "As vLLM's argument."


class VllmArguments(GraphOptions):
    """vLLM's most common engine arguments; None for vLLM's default. `arguments` holds any other."""

    engine = "vllm"
    extra = "vllm"
    weights = WEIGHTS
    runs_batches = False
    library = "vllm"
    others = "vLLM"
    order = 2

    compilation_config: Mapping[str, object] | None = option(None, AS_VLLM)
    cpu_offload_gb: float | None = option(None, AS_VLLM)
    data_parallel_size: int | None = option(None, AS_VLLM)
    dtype: str | None = option(None, AS_VLLM)
    enable_chunked_prefill: bool | None = option(None, AS_VLLM)
    enable_lora: bool | None = option(None, AS_VLLM)
    enable_prefix_caching: bool | None = option(None, AS_VLLM)
    gpu_memory_utilization: float | None = option(None, AS_VLLM)
    hf_overrides: Mapping[str, object] | None = option(None, AS_VLLM)
    kv_cache_dtype: str | None = option(None, AS_VLLM)
    limit_mm_per_prompt: Mapping[str, int] | None = option(None, AS_VLLM)
    load_format: str | None = option(None, AS_VLLM)
    max_model_len: int | None = option(None, AS_VLLM)
    max_num_batched_tokens: int | None = option(None, AS_VLLM)
    max_num_seqs: int | None = option(None, AS_VLLM)
    pipeline_parallel_size: int | None = option(None, AS_VLLM)
    quantization: str | None = option(None, AS_VLLM)
    speculative_config: Mapping[str, object] | None = option(None, AS_VLLM)
    tensor_parallel_size: int | None = option(None, AS_VLLM)
    tokenizer: str | Path | None = option(None, AS_VLLM)
    tokenizer_mode: str | None = option(None, AS_VLLM)
    trust_remote_code: bool | None = option(None, AS_VLLM)
    arguments: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def names(cls) -> tuple[str, ...] | None:
        """Its own names and vLLM's; None if vLLM is not installed."""
        others = vllm_arguments()
        return None if others is None else tuple(dict.fromkeys((*(super().names() or ()), *others)))

    @classmethod
    def of(cls, model: str | Path | None, given: Mapping[str, Any]) -> Self:
        """The object for options as a mapping, which holds the arguments of vLLM apart from its own."""
        own = {one.name for one in declared(cls)}
        known = {name: value for name, value in given.items() if name in own}
        return cls(model=model, arguments={name: given[name] for name in given if name not in own}, **known)

    def check(self) -> None:
        """Check the values of its own options; vLLM checks its arguments itself."""
        check_types(self, "model", *(one.name for one in declared(VllmArguments)))

    def given(self) -> dict[str, object]:
        return {**super().given(), **self.arguments}

    def engine_args(self) -> dict[str, object]:
        """The arguments for vLLM that are given."""
        own = {one.name for one in declared(type(self))} - {one.name for one in declared(VllmArguments)}
        return {name: value for name, value in self.given().items() if name not in own}


@functools.cache
def vllm_arguments() -> tuple[str, ...] | None:
    """The names of vLLM's engine arguments, from its source; None if it is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("vllm")
    file = Path(spec.origin).parent / "engine" / "arg_utils.py" if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = [node for node in body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")]
    assigned = [node.target for kind in kinds for node in kind.body if isinstance(node, ast.AnnAssign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    return tuple(name for name in names if name != "model" and not name.startswith("_")) or None


class VllmPooling(TextOptions, VllmArguments):
    """Options of all engines for texts with vLLM's pooling runner."""

    def engine_args(self) -> dict[str, object]:
        """The arguments for vLLM that are given, without `max_model_len`, which applies when texts are tokenized."""
        return {name: value for name, value in super().engine_args().items() if name != "max_model_len"}


class VllmEmbedding(VectorOptions, PromptOptions, VllmPooling):
    """One vector for each text, as `Embedding` makes it."""

    task = "embed"
    factory = "headrace.engines.vllm.pooling:embed"
    default_model = DEFAULT_MODEL


class VllmClassification(LabelOptions, VllmPooling):
    """The labels of texts, or of pairs."""

    task = "classify"
    factory = "headrace.engines.vllm.pooling:classify"


class VllmScoring(VllmPooling):
    """One score for each pair of texts."""

    task = "score"
    factory = "headrace.engines.vllm.pooling:score"


class VllmGeneration(LongPromptOptions, SamplingOptions, AnswerOptions, NamedAdapterOptions, VllmArguments):
    """Answers to prompts and chats with vLLM."""

    task = "generate"
    factory = "headrace.engines.vllm.engine:VllmEngine"
    default_model = "arithmetic"
    splits = True
    leads_on_gpu = True

    chat: bool | None = option(
        None,
        "Whether a plain text is a user's message (true) or a prompt to continue (false). Default: true if the model "
        "has a chat template.",
    )
    seed: int | None = option(
        None,
        "If set, a sampled answer depends only on it, on the prompt and on its place in the job, and sampling is "
        "somewhat slower; a request's own seed takes precedence.",
    )
