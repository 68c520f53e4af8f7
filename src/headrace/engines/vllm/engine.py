"""Text generation by vLLM: it batches by itself, in processes of its own, and is fed one request at a time."""

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

# vLLM tells much, and on standard error, where a job's progress bar is. Set before its import, for its processes too.
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
from headrace.engines.base import Prepared
from headrace.engines.chat import TEXT_ONLY, with_known_roles
from headrace.engines.model_folder import check_tokenizer, digest, find_folder
from headrace.engines.profile import EngineProfile
from headrace.engines.requests import Generation, Request, Sampling, default_sampling, parse
from headrace.engines.vllm.requests import EXTRA, MULTIMODAL, check_unicode, sampling_params
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError

_SAMPLING = frozenset(field.name for field in fields(Sampling)) - {"seed"}  # --seed is the engine's

# Engine arguments that decide where and how fast a model runs, not what it says: a job may be resumed with others.
_RESOURCES = frozenset({
    "block_size", "data_parallel_size", "distributed_executor_backend", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "max_num_batched_tokens", "max_num_seqs", "max_parallel_loading_workers", "pipeline_parallel_size",
    "tensor_parallel_size",
})  # fmt: skip

_FEWEST_AHEAD = 16
"""Requests that wait inside vLLM at least, so that those which end together are replaced within a step."""


@dataclass(frozen=True, slots=True)
class _Payload:
    prompt: object
    """What vLLM's renderer made: token ids."""
    params: SamplingParams
    listener: Callable[[str], None] | None = None
    """Hears the text so far."""


class VllmEngine:
    """Answers prompts and chats with vLLM's asynchronous engine.

    Args:
        model: a local folder; None for the arithmetic model that comes with Headrace.
        chat: whether a text is a chat's message (True) or the beginning to go on from (False); None for a chat where
            the model has a template.
        system_prompt: begins every chat that has no system message; makes chats of texts.
        seed: vLLM's own. Where it is given, every sampled answer depends on it and on its prompt alone; else on the
            company of the request too. (vLLM draws somewhat slower that way.)
        options: sampling parameters for records that have none of their own (`max_tokens`, `temperature`, `stop`, ...),
            and any argument of vLLM's `EngineArgs` (`tensor_parallel_size`, `max_model_len`, `dtype`, ...).

    Raises:
        ConfigError: no such folder, a file is missing in it, or an option that vLLM does not have or refuses.
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
        )

        # Tokenizing on worker threads needs a tokenizer that nothing else touches: the engine's own serves its event
        # loop meanwhile, and one object cannot do both at once.
        self._renderer = renderer_from_config(config)
        self._renderer.tokenizer = copy.deepcopy(self._renderer.tokenizer)
        self._rendering = threading.Lock()
        self._template = getattr(self._renderer.tokenizer, "chat_template", None)
        self._chat = self._template is not None if chat is None else chat
        self._parts = TEXT_ONLY | MULTIMODAL if config.model_config.is_multimodal_model else TEXT_ONLY
        self._numbers = count()
        # vLLM's tasks live on one loop, whichever loop the callers are on.
        self._loop = LoopThread("headrace-vllm")

    def describe(self) -> Mapping[str, object]:
        """What decides the answers."""
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
        """Chat templates rendered and texts tokenized; a record costs the tokens of its prompt."""
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
        except (ValueError, TypeError) as error:  # where vLLM does not check itself, and says not what it is about
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
        return Prepared(_Payload(prompt, params), cost=length)

    def _render(self, request: Request) -> Any:
        """Token ids, as `LLM.generate` and `LLM.chat` would make them."""
        renderer = self._renderer
        if request.messages is None:
            return renderer.render_cmpl([parse_model_prompt(renderer.model_config, request.prompt)])[0]
        given: Any = request.extra.get("chat_template_kwargs", {})
        template = {"add_generation_prompt": True, **given}
        messages = with_known_roles(request.messages, str(self._template))
        _, prompts = renderer.render_chat([messages], ChatParams(chat_template_kwargs=template))
        return prompts[0]

    def follow(self, payload: _Payload, listener: Callable[[str], None]) -> _Payload:
        """The same request, whose text so far is told to `listener` on the engine's thread, whenever it has grown."""
        params = copy.copy(payload.params)
        params.output_kind = RequestOutputKind.CUMULATIVE
        return replace(payload, params=params, listener=listener)

    async def infer(self, payload: _Payload) -> Generation:
        """The answer to one request.

        Raises:
            RecordError: vLLM refuses the request.
            EngineError: vLLM failed at this request, and lives on.
            EngineDeadError: its core process is gone.
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
        """On the engine's own loop; cancelling it aborts the request."""
        try:
            async with aclosing(engine.generate(payload.prompt, payload.params, str(next(self._numbers)))) as outputs:
                async for output in outputs:
                    if payload.listener is not None and output.outputs[0].text:
                        payload.listener(output.outputs[0].text)
                    if output.finished:
                        return _generation(output)
        except VllmDeadError as error:
            raise EngineDeadError("vLLM's core process is gone; its last words are above") from error
        except _REFUSALS as error:
            raise RecordError(_line(error)) from error
        except vllm.exceptions.VLLMServerError as error:
            raise EngineError(f"vLLM failed at this request: {_line(error.__cause__ or error)}") from error
        raise EngineError("vLLM ended the request without an answer")

    def close(self) -> None:
        """End vLLM's processes. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # Its own task too: that would report as an error that the core is gone, which is meant to be.
            self._loop.cancel_all()
            engine.shutdown()
            self._loop.close()
            self._renderer.shutdown()


# A request that vLLM does not take. Its checks raise its own error in most places, a plain one in others.
_REFUSALS = (VLLMClientError, ValueError, TypeError)


def _start(folder: Path, options: Mapping[str, object]) -> AsyncLLM:
    known = {field.name for field in fields(AsyncEngineArgs)} - {"model"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"engine vllm has no option {unknown[0]!r}: vLLM {vllm.__version__} has no such argument")
    quiet = {"disable_log_stats": True, "enable_log_requests": False, "use_tqdm_on_load": False}
    try:
        # On a thread of its own: made where an event loop runs, its tasks would be that loop's, and its answers lost.
        with _no_interrupts(), ThreadPoolExecutor(1) as thread:
            args = AsyncEngineArgs(model=str(folder), **{**quiet, **options})
            return thread.submit(AsyncLLM.from_engine_args, args).result()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses its options: {_line(error)}") from error
    except (OSError, RuntimeError, ImportError) as error:
        raise EngineError(f"vLLM cannot start with the model in {folder}: {_line(error)}") from error


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C.

    A terminal sends it to them too, and vLLM's core would drop what is in flight, which is to be finished.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _own_seed(seed: int, tokens: Sequence[int]) -> int:
    """The same for the same prompt, wherever it stands in the input and whatever runs beside it."""
    text = f"{seed}:{','.join(map(str, tokens))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _generation(output: vllm.RequestOutput) -> Generation:
    answer = output.outputs[0]
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
