"""Text generation with vLLM, which does its own batching in child processes and takes one request at a time."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

# vLLM logs to standard error, where the job's progress bar is. Set before its import, for its processes too.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.renderers import ChatParams, renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.base import PrefixCacheStats, Prepared
from headrace.engines.chat import TEXT_ONLY, with_known_roles
from headrace.engines.model_folder import check_tokenizer, digest, find_folder
from headrace.engines.profile import EngineProfile
from headrace.engines.requests import Generation, Request, Sampling, default_sampling, parse
from headrace.engines.vllm.requests import EXTRA, MULTIMODAL, check_unicode, sampling_params
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError, TransientError

_SAMPLING = frozenset(field.name for field in fields(Sampling)) - {"seed"}  # --seed is the engine's

# Engine arguments that do not affect answers: a job may be resumed with different ones.
_RESOURCES = frozenset({
    "block_size", "data_parallel_size", "distributed_executor_backend", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "max_num_batched_tokens", "max_num_seqs", "max_parallel_loading_workers", "pipeline_parallel_size",
    "tensor_parallel_size",
})  # fmt: skip

_FEWEST_AHEAD = 16
"""Minimum number of requests queued inside vLLM, so that requests that end together are replaced within a step."""


@dataclass(frozen=True, slots=True)
class _Payload:
    prompt: object
    """Token ids from vLLM's renderer."""
    params: SamplingParams
    listener: Callable[[str], None] | None = None
    """Called with the partial text."""


class VllmEngine:
    """Answers prompts and chats with vLLM's asynchronous engine.

    Args:
        model: a local folder; None for the arithmetic model that ships with Headrace.
        chat: whether a plain text is a user's message (True) or a prompt to continue (False); None for True if the
            model has a chat template.
        system_prompt: for each chat without a system message; a plain text is then a user's message.
        seed: vLLM's seed. If set, a sampled answer depends only on it and on the prompt, and sampling is somewhat
            slower; otherwise it also depends on other requests in the batch.
        options: default sampling parameters (`max_tokens`, `temperature`, `stop`, ...), and any argument of vLLM's
            `EngineArgs` (`tensor_parallel_size`, `max_model_len`, `dtype`, ...).

    Raises:
        ConfigError: no such folder, a file is missing in it, or vLLM does not have or refuses an option.
        EngineError: vLLM cannot start.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        chat: bool | None = None,
        system_prompt: str | None = None,
        seed: int | None = None,
        **options: object,
    ) -> None:
        self._folder = find_folder("arithmetic" if model is None else model)
        if "tokenizer" not in options:
            check_tokenizer(self._folder)
        self._defaults = default_sampling({name: options.pop(name) for name in sorted(_SAMPLING & options.keys())})
        self._system_prompt, self._seed = system_prompt, seed
        self._engine_args = options if seed is None else {"seed": seed, **options}
        self._engine: AsyncLLM | None = _start(self._folder, self._engine_args)
        config = self._engine.vllm_config
        self.max_model_len = int(config.model_config.max_model_len)
        slots = int(config.scheduler_config.max_num_seqs)
        self.profile = EngineProfile(
            batching="own",
            max_in_flight=slots + max(slots // 4, _FEWEST_AHEAD),
            max_model_len=self.max_model_len,
            followable=True,
            caches_prefixes=bool(config.cache_config.enable_prefix_caching),
        )
        self._prompt_tokens = self._cached_tokens = 0

        # Worker threads need a private tokenizer: the event loop uses the engine's at the same time, and tokenizers
        # are not thread-safe.
        self._renderer = renderer_from_config(config)
        self._renderer.tokenizer = copy.deepcopy(self._renderer.tokenizer)
        self._rendering = threading.Lock()
        self._template = getattr(self._renderer.tokenizer, "chat_template", None)
        self._chat = self._template is not None if chat is None else chat
        self._parts = TEXT_ONLY | MULTIMODAL if config.model_config.is_multimodal_model else TEXT_ONLY
        self._numbers = count()
        # vLLM's tasks need a single event loop; callers use different ones.
        self._loop = LoopThread("headrace-vllm")

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
            "system_prompt": self._system_prompt,
            "options": {name: value for name, value in self._engine_args.items() if name not in _RESOURCES},
        }

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[_Payload] | Exception]:
        """Render chat templates and tokenize; a record costs the number of prompt tokens."""
        return [self._prepare(value) for value in inputs]

    def _prepare(self, value: object) -> Prepared[_Payload] | Exception:
        request: Request | None = None
        try:
            request = parse(
                value,
                self._defaults,
                system_prompt=self._system_prompt,
                chat=self._chat,
                extra=EXTRA,
                parts=self._parts,
            )
            params = sampling_params(request)
            check_unicode(request)
            with self._rendering:
                prompt = self._render(request)
        except RecordError as error:
            return error
        except VLLMClientError as error:
            return RecordError(_line(error))
        except (ValueError, TypeError) as error:  # vLLM's message may not name the field
            about = ", ".join(request.extra) if request is not None and request.extra else "the request"
            return RecordError(f"vLLM refuses {about}: {_line(error)}")
        tokens = prompt["prompt_token_ids"]
        if self._seed is not None and params.seed is None and params.temperature > 0:
            params.seed = _own_seed(self._seed, tokens)
        length = len(tokens)
        if length >= self.max_model_len:
            return RecordError(
                f"the prompt has {length} tokens, and max_model_len is {self.max_model_len}: there is no room for an "
                "answer; shorten it, or raise --max-model-len"
            )
        return Prepared(_Payload(prompt, params), cost=length, greedy=params.temperature == 0)

    def _render(self, request: Request) -> Any:
        """Token ids, the same as in `LLM.generate` and `LLM.chat`."""
        renderer = self._renderer
        if request.messages is None:
            return renderer.render_cmpl([parse_model_prompt(renderer.model_config, request.prompt)])[0]
        given: Any = request.extra.get("chat_template_kwargs", {})
        template = {"add_generation_prompt": True, **given}
        messages = with_known_roles(request.messages, str(self._template))
        _, prompts = renderer.render_chat([messages], ChatParams(chat_template_kwargs=template))
        return prompts[0]

    def follow(self, payload: _Payload, listener: Callable[[str], None]) -> _Payload:
        """The same request; the engine's thread calls `listener` with the partial text whenever it grows."""
        params = copy.copy(payload.params)
        params.output_kind = RequestOutputKind.CUMULATIVE
        return replace(payload, params=params, listener=listener)

    async def infer(self, payload: _Payload) -> Generation:
        """The answer to one request.

        Raises:
            RecordError: vLLM refuses the request.
            TransientError: vLLM aborted the request, as when it shuts down.
            EngineError: vLLM failed at this request, but is still running.
            EngineDeadError: vLLM's core process ended.
        """
        engine, task = self._engine, asyncio.current_task()
        if engine is None:
            raise EngineDeadError("the vLLM engine is closed; create a new one")
        try:
            return await asyncio.wrap_future(self._loop.submit(self._generate(engine, payload)))
        except asyncio.CancelledError:
            if self._engine is None and task is not None and not task.cancelling():
                raise EngineDeadError("the vLLM engine was closed before it had answered") from None
            raise

    async def _generate(self, engine: AsyncLLM, payload: _Payload) -> Generation:
        """Runs on the engine's loop; cancelling it aborts the request."""
        try:
            async with aclosing(engine.generate(payload.prompt, payload.params, str(next(self._numbers)))) as outputs:
                async for output in outputs:
                    if payload.listener is not None and output.outputs[0].text:
                        payload.listener(output.outputs[0].text)
                    if output.finished:
                        self._prompt_tokens += len(output.prompt_token_ids or ())
                        self._cached_tokens += max(output.num_cached_tokens or 0, 0)
                        return _generation(output)
        except VllmDeadError as error:
            raise EngineDeadError("vLLM's core process is gone; its last words are above") from error
        except _REFUSALS as error:
            raise RecordError(_line(error)) from error
        except vllm.exceptions.VLLMServerError as error:
            raise EngineError(f"vLLM failed at this request: {_line(error.__cause__ or error)}") from error
        raise EngineError("vLLM ended the request without an answer")

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of the prompt tokens of answered requests."""
        queries, hits = self._prompt_tokens, self._cached_tokens
        return PrefixCacheStats(queries, hits, queries - hits)

    def close(self) -> None:
        """End vLLM's processes. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # Includes vLLM's own task, which would report the intended end of the core process as an error.
            self._loop.cancel_all()
            engine.shutdown()
            self._loop.close()
            self._renderer.shutdown()


# Errors that vLLM raises for an invalid request: its own type or a built-in one.
_REFUSALS = (VLLMClientError, ValueError, TypeError)


def _start(folder: Path, options: Mapping[str, object]) -> AsyncLLM:
    known = {field.name for field in fields(AsyncEngineArgs)} - {"model"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"engine vllm has no option {unknown[0]!r}: vLLM {vllm.__version__} has no such argument")
    quiet = {"disable_log_stats": True, "enable_log_requests": False, "use_tqdm_on_load": False}
    try:
        # On a separate thread: on a running event loop, vLLM would attach its tasks to that loop and lose answers.
        with _no_interrupts(), ThreadPoolExecutor(1) as thread:
            args = AsyncEngineArgs(model=str(folder), **{**quiet, **options})
            return thread.submit(AsyncLLM.from_engine_args, args).result()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses its options: {_line(error)}") from error
    except (OSError, RuntimeError, ImportError) as error:
        raise EngineError(f"vLLM cannot start with the model in {folder}: {_line(error)}") from error


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Child processes started in this context ignore Ctrl-C.

    A terminal sends Ctrl-C to them too, and vLLM's core would drop requests in flight, which must be finished.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _own_seed(seed: int, tokens: Sequence[int]) -> int:
    """A seed that depends only on the engine's seed and the prompt."""
    text = f"{seed}:{','.join(map(str, tokens))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _generation(output: vllm.RequestOutput) -> Generation:
    answer = output.outputs[0]
    if answer.finish_reason == "abort":  # as when the core shuts down: not a record failure
        raise TransientError("vLLM aborted the request")
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request with {answer.finish_reason!r}")
    return Generation(
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(answer.token_ids),
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
