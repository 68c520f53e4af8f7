"""Text generation with vLLM, which does its own batching in child processes and takes one request at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.engines.vllm.core import VllmCore, deciding, line  # before vLLM: it sets vLLM's log level

# isort: split
import vllm
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers import ChatParams, renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.engines.base import PartialAnswer, Prepared, PreparedRecords
from headrace.engines.capabilities import PrefixCacheStats, Sleeper
from headrace.engines.model_folder import adapter_config, adapter_facts, check_tokenizer, digest, find_folder
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.answer_parts import AnswerReader
from headrace.engines.requests.chat import TEXT_ONLY, with_known_roles
from headrace.engines.requests.chat_answers import (
    PROMPT_END,
    ChatHabits,
    template_arguments,
    with_parts,
)
from headrace.engines.requests.generation import (
    GeneratedText,
    Request,
    TokenChance,
    derived_seed,
    nth_seed,
    parse,
)
from headrace.engines.requests.long_prompts import Place, PromptSplitter, PromptTooLongError, prepared_by, room_of
from headrace.engines.vllm.options import VllmGeneration
from headrace.engines.vllm.requests import EXTRA, MULTIMODAL, STRUCTURE_OPTIONS, check_unicode, sampling_params
from headrace.errors import EngineError, RecordError, TransientError

_TOO_LONG = ("input_tokens", "input_text")
"""What vLLM's errors for prompts that are too long name as their parameter."""


@dataclass(frozen=True, slots=True)
class _Payload:
    prompt: object
    """Token ids from vLLM's renderer."""
    params: SamplingParams
    listener: Callable[[PartialAnswer], None] | None = None
    """Called with the partial answer."""
    reader: AnswerReader | None = None
    """Takes the answer apart; None for one that is text alone."""
    counts_cached: bool = False
    """Whether the answer has `cached_tokens`."""
    lora: LoRARequest | None = None
    """Its adapter."""

    def sample(self, number: int, *, scored: bool) -> _Payload:
        """The same request with other random numbers; with log probabilities if it is `scored`."""
        params = copy.copy(self.params)
        params.seed = nth_seed(params.seed, number)
        if scored:
            params.logprobs = 0
        return replace(self, params=params)


class VllmEngine:
    """Answers prompts and chats with vLLM's asynchronous engine.

    Raises:
        ConfigError: no such folder, a file is missing in it, or vLLM does not have or refuses an option.
        EngineError: vLLM cannot start.
    """

    def __init__(self, options: VllmGeneration) -> None:
        self._folder = find_folder("arithmetic" if options.model is None else options.model)
        if options.tokenizer is None:
            check_tokenizer(self._folder)
        self._long = options.long_prompts()
        self._splitter = PromptSplitter(self._long, self) if self._long.splits else None
        self._defaults = options.sampling()
        self._options, self._seed = options, options.seed
        self._tools, self._examples = options.tool_use(), options.example_messages()
        self._engine_args = options.engine_args() | ({} if options.seed is None else {"seed": options.seed})
        folders = {"": options.adapter} if options.adapter is not None else dict(options.adapters or {})
        self._loras = {
            name: LoRARequest(name or "adapter", number, str(Path(folder).expanduser().resolve()))
            for number, (name, folder) in enumerate(folders.items(), 1)
        }
        if folders:
            rank = max(adapter_config(folder).get("r", 16) for folder in folders.values())
            most = next((size for size in (16, 32, 64, 128, 256) if size >= rank), 512)  # vLLM takes these
            sizes = {"max_lora_rank": most, "max_loras": len(folders)}
            self._engine_args = {"enable_lora": True, **sizes, **self._engine_args}
        self._core = VllmCore(self._folder, self._engine_args)
        config, self.max_model_len = self._core.config, self._core.max_model_len
        self.profile = EngineProfile(
            batching="own",
            max_in_flight=self._core.max_in_flight,
            max_model_len=self.max_model_len,
            splits=self._long.splits,
            followable=True,
            holds_forms=True,
            draws=options.seed is not None,
            caches_prefixes=bool(config.cache_config.enable_prefix_caching),
        )
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

        # Worker threads need a private tokenizer: the event loop uses the engine's at the same time, and tokenizers
        # are not thread-safe.
        self._renderer = renderer_from_config(config)
        self._renderer.tokenizer = copy.deepcopy(self._renderer.tokenizer)
        self._rendering = threading.Lock()
        self._template = getattr(self._renderer.tokenizer, "chat_template", None)
        self._chat = self._template is not None if options.chat is None else options.chat
        self._habits = ChatHabits.of(self._template, options.tool_call_parser, options.reasoning_parser)
        self._parts = TEXT_ONLY | MULTIMODAL if config.model_config.is_multimodal_model else TEXT_ONLY

    def describe(self) -> Mapping[str, object]:
        """The vLLM version, the model digest and all options that affect answers."""
        sampling = {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self._defaults).items()
        }
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "model": digest(self._folder),
            "max_model_len": self.max_model_len,
            "sampling": sampling,
            "chat": self._chat,
            **self._options.described(),
            **adapter_facts(self._options.adapter, self._options.adapters),
            "options": deciding(self._engine_args),
            **self._long.describe(),
        }

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords:
        """Render chat templates and tokenize; a record costs the number of prompt tokens."""
        return prepared_by(inputs, self, self._splitter)

    def count(self, request: object) -> int:
        try:
            return len(self._rendered(self._parsed(request))[0]["prompt_token_ids"])
        except PromptTooLongError:
            return self.max_model_len + 1

    def room(self, request: object) -> int:
        return room_of(self.max_model_len, self._parsed(request).sampling.max_tokens)

    def _parsed(self, value: object) -> Request:
        return parse(
            value,
            self._defaults,
            system_prompt=self._options.system_prompt,
            chat=self._chat,
            extra=EXTRA,
            parts=self._parts,
            structures=STRUCTURE_OPTIONS,
            tools=self._tools,
            examples=self._examples,
            adapters=self._options.adapters or (),
        )

    def _rendered(self, request: Request) -> tuple[Any, SamplingParams]:
        try:
            params = sampling_params(request)
            check_unicode(request)
            with self._rendering:
                return self._render(request), params
        except VLLMClientError as error:
            kind = PromptTooLongError if getattr(error, "parameter", None) in _TOO_LONG else RecordError
            raise kind(line(error)) from error
        except RecordError:
            raise
        except (ValueError, TypeError) as error:  # vLLM's message may not name the field
            about = ", ".join(request.extra) or "the request"
            raise RecordError(f"vLLM refuses {about}: {line(error)}") from error

    def whole(self, request: object, place: Place) -> Prepared[_Payload]:
        parsed = self._parsed(request)
        prompt, params = self._rendered(parsed)
        tokens = prompt["prompt_token_ids"]
        with self._rendering:
            end = self._renderer.tokenizer.decode(tokens[-PROMPT_END:])
        reader = self._habits.reader(parsed, end, str(derived_seed(0, place, tokens)), listed=True)
        if self._seed is not None and params.seed is None and params.temperature > 0:
            params.seed = derived_seed(self._seed, place, tokens)
        length = len(tokens)
        if length >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, and max_model_len is {self.max_model_len}: there is no room for an "
                "answer; shorten it, raise ``max_model_len``, or split it (``on_too_long=split``)"
            )
        lora = self._loras.get(parsed.adapter or "")
        payload = _Payload(prompt, params, reader=reader, lora=lora)
        return Prepared(payload, cost=length, greedy=params.temperature == 0)

    def _render(self, request: Request) -> Any:
        """Token ids, the same as in `LLM.generate` and `LLM.chat`."""
        renderer = self._renderer
        if request.messages is None:
            return renderer.render_cmpl([parse_model_prompt(renderer.model_config, request.prompt)])[0]
        request = self._habits.told(request)
        tools = self._habits.template_tools(request)
        template = {"add_generation_prompt": True, **template_arguments(request)}
        if tools is not None:
            template["tools"] = tools
        messages = with_known_roles(request.messages or (), str(self._template))
        _, prompts = renderer.render_chat([messages], ChatParams(chat_template_kwargs=template))
        return prompts[0]

    def follow(self, payload: _Payload, listener: Callable[[PartialAnswer], None]) -> _Payload:
        """The same request; the engine's thread calls `listener` with the partial answer whenever it grows."""
        params = copy.copy(payload.params)
        params.output_kind = RequestOutputKind.CUMULATIVE
        return replace(payload, params=params, listener=listener)

    def count_cached(self, payload: _Payload) -> _Payload:
        return replace(payload, counts_cached=True)

    async def infer(self, payload: _Payload) -> GeneratedText:
        """The answer to one request.

        Raises:
            RecordError: vLLM refuses the request.
            TransientError: vLLM aborted the request, as when it shuts down.
            EngineError: vLLM failed at this request, but is still running.
            EngineDeadError: vLLM's core process ended.
        """
        return await self._core.run(partial(self._generate, payload))

    async def _generate(self, payload: _Payload, engine: AsyncLLM, number: str) -> GeneratedText:
        async with aclosing(
            engine.generate(payload.prompt, payload.params, number, lora_request=payload.lora)
        ) as outputs:
            async for output in outputs:
                if payload.listener is not None and output.outputs[0].text:
                    text = output.outputs[0].text
                    payload.listener(text if payload.reader is None else payload.reader.parts(text, ended=False))
                if output.finished:
                    generation = _generation(output)
                    if payload.reader is not None:
                        generation = with_parts(generation, payload.reader.parts(generation["text"]))
                    self._prompt_tokens += generation["prompt_tokens"]
                    self._generated_tokens += generation["completion_tokens"]
                    cached = max(output.num_cached_tokens or 0, 0)
                    self._cached_tokens += cached
                    return {**generation, "cached_tokens": cached} if payload.counts_cached else generation
        raise EngineError("vLLM ended the request without an answer")

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of the prompt tokens of answered requests."""
        queries, hits = self._prompt_tokens, self._cached_tokens
        return PrefixCacheStats(queries, hits, queries - hits, self._generated_tokens)

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self._core.sleeper

    def close(self) -> None:
        """End vLLM's processes. Safe to call twice."""
        self._core.close()
        self._renderer.shutdown()


def _generation(output: vllm.RequestOutput) -> GeneratedText:
    answer = output.outputs[0]
    if answer.finish_reason == "abort":  # as when the core shuts down: not a record failure
        raise TransientError("vLLM aborted the request")
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request with {answer.finish_reason!r}")
    generation = GeneratedText(
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(answer.token_ids),
    )
    if answer.logprobs is not None:
        chosen = ((places[token], token) for places, token in zip(answer.logprobs, answer.token_ids, strict=True))
        generation["logprobs"] = [
            TokenChance(token=one.decoded_token or str(token), logprob=one.logprob, bytes=None, top_logprobs=[])
            for one, token in chosen
        ]
    return generation
