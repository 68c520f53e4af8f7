"""vLLM's asynchronous engine with its processes, as the engines of language models and of pooling models share it."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TypeVar

# vLLM logs to standard error, where the job's progress bar is. Set before its import, for its processes too.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.capabilities import Sleeper
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError

ResultT = TypeVar("ResultT")

# Engine arguments that do not affect answers: a job may be resumed with different ones.
RESOURCES = frozenset({
    "block_size", "data_parallel_size", "distributed_executor_backend", "enable_chunked_prefill",
    "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "max_num_batched_tokens", "max_num_seqs", "max_parallel_loading_workers", "pipeline_parallel_size",
    "tensor_parallel_size",
})  # fmt: skip

_FEWEST_AHEAD = 16
"""Minimum number of requests queued inside vLLM, so that requests that end together are replaced within a step."""

_LONGEST_FOLDER = 50
"""Bytes of the path of a temporary folder that leave room for the names of sockets."""

# Errors that vLLM raises for an invalid request: its own type or a built-in one.
_REFUSALS = (VLLMClientError, ValueError, TypeError)


class VllmCore:
    """vLLM's engine on an event loop of its own: vLLM's tasks need a single loop, and callers use different ones.

    Raises:
        ConfigError: vLLM does not have or refuses an option.
        EngineError: vLLM cannot start.
    """

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        self._engine: AsyncLLM | None = _start(folder, options)
        self.config: VllmConfig = self._engine.vllm_config
        self.max_model_len = int(self.config.model_config.max_model_len)
        slots = int(self.config.scheduler_config.max_num_seqs)
        self.max_in_flight = slots + max(slots // 4, _FEWEST_AHEAD)
        self._numbers = count()
        self._loop = LoopThread("headrace-vllm")

    async def run(self, call: Callable[[AsyncLLM, str], Coroutine[None, None, ResultT]]) -> ResultT:
        """The result of `call` with the engine and the id of a new request, on the engine's loop.

        Cancelling it aborts the request.

        Raises:
            RecordError: vLLM refuses the request.
            EngineError: vLLM failed at this request, but is still running.
            EngineDeadError: vLLM's core process ended, or the engine is closed.
        """
        engine, task = self._engine, asyncio.current_task()
        if engine is None:
            raise EngineDeadError("the vLLM engine is closed; create a new one")
        try:
            return await asyncio.wrap_future(self._loop.submit(self._call(engine, call)))
        except asyncio.CancelledError:
            if self._engine is None and task is not None and not task.cancelling():
                raise EngineDeadError("the vLLM engine was closed before it had answered") from None
            raise

    def run_now(self, call: Callable[[AsyncLLM, str], Coroutine[None, None, ResultT]]) -> ResultT:
        """Like `run`, for code without an event loop. Blocks."""
        if self._engine is None:
            raise EngineDeadError("the vLLM engine is closed; create a new one")
        return self._loop.run(self._call(self._engine, call))

    async def _call(self, engine: AsyncLLM, call: Callable[[AsyncLLM, str], Coroutine[None, None, ResultT]]) -> ResultT:
        try:
            return await call(engine, str(next(self._numbers)))
        except VllmDeadError as error:
            raise EngineDeadError("vLLM's core process is gone; its last words are above") from error
        except _REFUSALS as error:
            raise RecordError(line(error)) from error
        except vllm.exceptions.VLLMServerError as error:
            raise EngineError(f"vLLM failed at this request: {line(error.__cause__ or error)}") from error

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self if self.config.model_config.enable_sleep_mode else None

    def sleep(self) -> None:
        """Move the weights to host memory. The key-value cache is freed."""
        self.run_now(lambda engine, _: engine.sleep(level=1))

    def wake(self) -> None:
        self.run_now(lambda engine, _: engine.wake_up())

    def close(self) -> None:
        """End vLLM's processes. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # Includes vLLM's own task, which would report the intended end of the core process as an error.
            self._loop.cancel_all()
            engine.shutdown()
            self._loop.close()


def deciding(options: Mapping[str, object]) -> dict[str, object]:
    """The engine arguments that may affect an answer."""
    return {name: value for name, value in options.items() if name not in RESOURCES}


def _start(folder: Path, options: Mapping[str, object]) -> AsyncLLM:
    known = {field.name for field in fields(AsyncEngineArgs)} - {"model"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"engine vllm has no option {unknown[0]!r}: vLLM {vllm.__version__} has no such argument")
    _gather_sockets()
    quiet = {"disable_log_stats": True, "enable_log_requests": False, "use_tqdm_on_load": False}
    try:
        # On a separate thread: on a running event loop, vLLM would attach its tasks to that loop and lose answers.
        with _no_interrupts(), ThreadPoolExecutor(1) as thread:
            args = AsyncEngineArgs(model=str(folder), **{**quiet, **options})
            return thread.submit(AsyncLLM.from_engine_args, args).result()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses its options: {line(error)}") from error
    except (OSError, RuntimeError, ImportError) as error:
        raise EngineError(f"vLLM cannot start with the model in {folder}: {line(error)}") from error


@functools.cache
def _gather_sockets() -> None:
    """Let vLLM make its sockets in a folder that is removed when this process ends: vLLM leaves them behind.

    One folder serves all engines, as vLLM keeps the variable that it has read. The path of a socket has at most 107
    bytes, of which vLLM's name takes 37.
    """
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        usual = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="vllm-", dir=usual if len(usual.encode()) <= _LONGEST_FOLDER else "/tmp")
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


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


def line(error: BaseException) -> str:
    """An error's message in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(_field(one["loc"], one["msg"], one["input"]) for one in error.errors())
    return " ".join(str(error).split()) or type(error).__name__


def _field(place: tuple[int | str, ...], message: str, value: object) -> str:
    name = f"{place[0]}: " if place else ""
    return f"{name}{message}" + (f" (it is {value!r})" if isinstance(value, str | int | float) else "")
