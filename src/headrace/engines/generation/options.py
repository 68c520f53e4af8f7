"""Engines of language models on transformers, declared."""

from __future__ import annotations

from headrace.engines.model_folder import WEIGHTS
from headrace.engines.options import (
    AdapterOptions,
    AnswerOptions,
    DeviceOptions,
    LongPromptOptions,
    NamedAdapterOptions,
    SamplingOptions,
)
from headrace.options import option


class LanguageModelOptions(LongPromptOptions, SamplingOptions, AnswerOptions, AdapterOptions, DeviceOptions):
    """Options of both engines."""

    task = "generate"
    extra = "torch"
    default_model = "arithmetic"
    weights = WEIGHTS
    by_transformers = True
    holds_forms = True

    max_model_len: int | None = option(
        None, "Maximum tokens in a text. Default: the model's limit.", panel="Engine", minimum=1
    )
    chat: bool = option(False, "Whether a plain text is a user's message, not a prompt to continue.")
    seed: int = option(
        0,
        "Combined with each prompt and its place in the job to seed its sampling; a request's own seed takes "
        "precedence.",
    )


class Generation(NamedAdapterOptions, LanguageModelOptions):
    """Answers to prompts and chats; requests join and leave between steps."""

    engine = "torch"
    factory = "headrace.engines.generation.continuous:load"
    splits = True
    order = 0

    max_num_seqs: int | None = option(
        None, "Maximum concurrent answers. Default: 64; a job begins with 256 and finds the fastest number.", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum tokens in a step, those of prompts included. Default: 512, on a GPU 8,192; on a CPU a job begins with "
        "2,048 and finds the fastest number.",
        minimum=1,
    )
    kv_cache_tokens: int | None = option(
        None, "Size of the key-value cache in tokens. Default: what the device has room for."
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Whether prompts that begin with the same tokens use the same pages of the key-value cache. Default: yes, if "
        "the model's attention allows it.",
    )
    tensor_parallel_size: int = option(
        1, "Processes that hold a part of the model each, on a device of their own.", minimum=1
    )


class StaticGeneration(LanguageModelOptions):
    """Answers to padded batches of prompts, each until its last answer is done."""

    engine = "static"
    factory = "headrace.engines.generation.static:StaticGenerationEngine"
    order = 1

    max_num_seqs: int = option(16, "Maximum prompts per batch.", minimum=1)
