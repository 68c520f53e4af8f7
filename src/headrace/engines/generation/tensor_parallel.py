"""One language model on several devices: each process holds a part of every layer, and all run the same steps.

This process is rank 0. It schedules, chooses the tokens and answers. It starts the other ranks, which repeat its steps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from headrace.device.placement import choose_device
from headrace.engines.generation.paged_attention import StepPart
from headrace.engines.networks.files import load_config
from headrace.errors import ConfigError, EngineDeadError, EngineError, MissingExtraError, WorkerDiedError, text_of
from headrace.processes.actor import ActorProcess

if TYPE_CHECKING:
    from headrace.engines.generation.continuous import GenerationEngine

_HOST = "127.0.0.1"
_GRACE_S = 2.0
"""Seconds to wait for the news that a rank has ended, after a collective with it has failed."""


class Ranks:
    """The other ranks of a model, as processes of this machine.

    Args:
        size: the number of ranks, this one included.
        device: as set by the user.
        load: makes the engine of a rank; picklable.

    Raises:
        ConfigError: there are too few devices, or another model of this process is split.
        EngineError: a rank ended before it was ready.
    """

    def __init__(self, size: int, device: str, load: Callable[[], GenerationEngine]) -> None:
        if dist.is_initialized():
            raise ConfigError("another model of this process has ``tensor_parallel_size``; there can be only one")
        kind = _device_kind(size, device)
        self._lock = threading.Lock()
        self._failure = ""
        self._closed = False
        store = dist.TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
        each = max(torch.get_num_threads() // size, 1)
        self._ranks = [
            ActorProcess(
                _Rank, load, rank, size, store.port, kind,
                environment={"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": str(each)},
            )
            for rank in range(1, size)
        ]  # fmt: skip
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._call("ready")
            self._wait()
            self._call("load")
            dist.init_process_group(_backend(kind), store=store, rank=0, world_size=size)
            failed.pop_all()
        if kind == "cpu":
            torch.set_num_threads(each)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The body loads this rank's part while the others load theirs. Ends them if any of them fails.

        Raises:
            EngineError: a rank cannot load its part.
        """
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            try:
                with self._together():
                    yield
                    self._wait()
            except EngineDeadError as error:  # it was never alive
                raise EngineError(str(error)) from error.__cause__
            failed.pop_all()

    @contextmanager
    def step(self, parts: Sequence[StepPart]) -> Iterator[None]:
        """Let the others run the step that the body runs here.

        Raises:
            EngineDeadError: the step failed on one of the ranks, which have not the same state any more.
        """
        self._call("step", parts)
        with self._together():
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        """The body does here what the others do in their processes.

        Raises:
            EngineDeadError: it failed, whatever the reason: the others have done it, or wait in it for ever.
        """
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise self._ended(error) from error

    def _ended(self, error: BaseException) -> EngineDeadError:
        """What ended the model, if a step or loading raised `error` here."""
        waited = threading.Event()
        for _ in range(20):  # the news of a death may come after the broken connection
            if self._failure:
                break
            waited.wait(_GRACE_S / 20)
        reason = self._failure or f"rank 0 failed: {' '.join(text_of(error).split())}"
        return EngineDeadError(f"tensor parallel of {len(self._ranks) + 1} processes: {reason}")

    def close(self) -> None:
        """End the other ranks. Safe to call twice."""
        self._closed = True
        for rank in self._ranks:
            rank.kill()
        if dist.is_initialized():
            _leave_group()

    def _call(self, method: str, *arguments: object) -> None:
        self._calls = [rank.call(method, *arguments) for rank in self._ranks]
        for number, (rank, call) in enumerate(zip(self._ranks, self._calls, strict=True), 1):
            call.add_done_callback(functools.partial(self._note, number, rank))

    def _note(self, number: int, rank: ActorProcess, call: Future[object]) -> None:
        """Note a failure, and break the collective in which this rank may wait for that one."""
        error = call.exception()
        if error is None or self._closed:
            return
        with self._lock:
            if not self._failure:
                ended = isinstance(error, WorkerDiedError)
                said = text_of(error) if ended else f"it failed: {' '.join(text_of(error).split())}"
                self._failure = f"rank {number}: {said}"
        rank.kill()  # gloo notices the closed connection
        if dist.is_initialized() and dist.get_backend() == "nccl":
            _leave_group()

    def _wait(self) -> None:
        for call in self._calls:
            if (error := call.exception()) is not None:
                raise EngineError(str(self._ended(error))) from error


def start_ranks(folder: Path, size: int, device: str, load: Callable[[], GenerationEngine]) -> Ranks | None:
    """The other ranks of a model; None if it is not split, or in one of those ranks.

    Raises:
        ConfigError: the model or the device cannot be split like this.
        EngineError: a rank ended before it was ready.
    """
    if size == 1 or is_follower():
        return None
    load_options(size)  # before processes are started
    check_split(folder, size)
    return Ranks(size, device, load)


class _Rank:
    """Another rank, in its process; its methods are called in order."""

    def __init__(self, load: Callable[[], GenerationEngine], rank: int, size: int, port: int, kind: str) -> None:
        self._load = load
        self._place = (rank, size, port, kind)
        self._engine: GenerationEngine | None = None

    async def ready(self) -> None:
        """Answered once the process has imported what it needs."""

    async def load(self) -> None:
        rank, size, port, kind = self._place
        store = dist.TCPStore(_HOST, port, size, is_master=False, wait_for_workers=False)
        dist.init_process_group(_backend(kind), store=store, rank=rank, world_size=size)
        self._engine = self._load()

    async def step(self, parts: Sequence[StepPart]) -> None:
        assert self._engine is not None, "loaded"
        self._engine.repeat_step(parts)


def least_of_ranks(count: int, device: torch.device) -> int:
    """The smallest of the ranks' numbers, for which each of them must ask."""
    least = torch.tensor(count, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def is_follower() -> bool:
    """Whether this process is a rank that repeats rank 0's steps."""
    return bool(dist.is_initialized() and dist.get_rank() > 0)


def check_split(folder: Path, size: int) -> None:
    """Check that transformers can divide the model between `size` processes.

    Raises:
        ConfigError: it cannot.
        EngineError: the model's config.json cannot be read.
    """
    config = load_config(folder).get_text_config()
    kind = config.model_type
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"``tensor_parallel_size`` is {size}: transformers has no tensor-parallel plan for models of type {kind}; "
            "leave it out, or use engine vllm"
        )
    heads = config.num_attention_heads
    for name, count in (("attention", heads), ("key-value", getattr(config, "num_key_value_heads", None) or heads)):
        if count % size:
            raise ConfigError(
                f"``tensor_parallel_size`` is {size}: it must divide the model's {count} {name} heads; "
                f"use {' or '.join(str(n) for n in range(2, count + 1) if count % n == 0) or 1}"
            )


def load_options(size: int) -> Mapping[str, object]:
    """What `from_pretrained` takes to load this rank's part.

    Raises:
        MissingExtraError: accelerate is not installed.
        ConfigError: this transformers is too old.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError('``tensor_parallel_size`` needs accelerate: pip install "headrace[torch]"')
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise ConfigError("``tensor_parallel_size`` needs a newer transformers: pip install -U transformers") from error
    return {"distributed_config": DistributedConfig(tp_size=size)}


def _device_kind(size: int, device: str) -> str:
    place = choose_device(device)
    if ":" in device:  # a number that the user gave: a device always has one
        raise ConfigError(
            f"``device`` is {device!r}, and ``tensor_parallel_size`` {size} needs {size} devices: use ``device=cuda``, "
            "and CUDA_VISIBLE_DEVICES to choose among them"
        )
    if place.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            f"``device`` is {device!r}: transformers splits a model over the CUDA devices that it sees; set "
            "CUDA_VISIBLE_DEVICES= to split it over processes on the CPU"
        )
    if place.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"``tensor_parallel_size`` is {size}, and PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    return str(place.type)


def _backend(kind: str) -> str:
    return "nccl" if kind == "cuda" else "gloo"


def _leave_group() -> None:
    """End this process's part in the group without waiting for the others."""
    if dist.get_backend() == "nccl":  # destroying it would wait for ranks that are gone
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
