"""Run a batch engine in a child process: a crash or hang fails only the record that caused it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.batching.results import checked_results
from headrace.device.forward import Forwarded, ForwardMeter
from headrace.device.memory import AvailableMemory, PeakMeter
from headrace.engines.base import Prepared
from headrace.engines.capabilities import BATCHES, TUNING, memory_of
from headrace.engines.choosing import registry
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    HeadraceError,
    ProcessTimeoutError,
    WorkerDiedError,
    text_of,
)
from headrace.processes.actor import ActorProcess
from headrace.processes.crash_isolation import CrashIsolation, SharedDeathError
from headrace.processes.portable import pack, unpack

_AT_WORK_S = 1.0
"""How long `close` waits for a running call before it kills the process."""
_CLOSE_S = 3.0
"""How long the engine in the process may take to close."""
_ASK_S = 60.0
"""How long the process may take to say a fact, or to measure its device."""
_PREPARERS = 8
"""Threads that prepare records in the process at once, at most."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the process says of its engine once that is loaded."""

    profile: EngineProfile
    description: Mapping[str, object]
    hardware: Mapping[str, object]
    dtype_speeds: Mapping[str, float]
    meter: tuple[str, str] | None
    """The GPU and the device of its meter."""
    has_memory: bool


@dataclass(frozen=True, slots=True)
class _Reply:
    """The results of a call, and what was measured until then."""

    results: bytes
    forwarded: Forwarded | None
    peaks: tuple[int, ...]
    no_graphs: str = ""


class ProcessEngine:
    """The engine that `registry.create` returns, in a child process; satisfies `BatchEngine`.

    If the process dies in a batch, or is killed at the timeout, or its device is lost, it restarts with its model, and
    parts of what it worked on are retried alone until the record that caused it is isolated. Records are prepared
    while batches run, and as many batches run at once as in this process.

    Args:
        task, model, engine, options: see `registry.create`.
        timeout_s: maximum seconds to prepare a batch, and to run one; None for no limit.

    Raises:
        ConfigError: as `registry.create`, or the engine does not run batches.
        EngineError: as `registry.create`, or the process ended while loading the model.
    """

    def __init__(
        self,
        task: str,
        model: str | Path | None = None,
        *,
        engine: object = None,
        options: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if engine is not None and not isinstance(engine, str):
            raise ConfigError(
                "``engine_process`` needs an engine by name: pass module:name instead of the function or object, so "
                "that the process can import it"
            )
        declared = registry.engine_named(task, engine)
        if declared is not None and not declared.runs_batches:  # refused before a model is loaded
            raise _no_batches(engine)
        self._arguments = (task, model, engine, dict(options or {}))
        self._closed = False
        self._gate = _Gate()
        self._starting = threading.Lock()
        self._actor: ActorProcess | None = None
        self._timeout_s = timeout_s
        self._meter: _RemoteMeter | None = None
        self._start()
        self.profile = self._facts.profile
        self._meter = _RemoteMeter(*self._facts.meter, self._facts.has_memory, self._ask) if self._facts.meter else None
        self._prepare, self._forward = (
            CrashIsolation(partial(self._call, name), partial(self._call, name, alone=True))
            for name in ("prepare", "forward")
        )
        self._prepare_rows = self.profile.batch_size if timeout_s is not None else None

    def hardware(self) -> Mapping[str, object]:
        return self._facts.hardware

    def dtype_speeds(self) -> Mapping[str, float]:
        return self._facts.dtype_speeds

    def forward_meter(self) -> ForwardMeter | None:
        return self._meter

    def describe(self) -> Mapping[str, object]:
        """The engine's own description: a job can start in this process and resume in a child process."""
        return self._facts.description

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The engine's results; a WorkerDiedError for an input that ends the process."""
        rows = self._prepare_rows or max(1, len(inputs))  # the time limit is per batch
        pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        return [result for piece in pieces for result in self._prepare.results(piece)]

    def forward(self, batch: list[object]) -> list[object]:
        """The engine's results; an exception for a record that ends or blocks the process.

        Raises:
            EngineDeadError: the model cannot be loaded again, or too many records in a row end the process.
        """
        return self._forward.results(batch)

    def close(self) -> None:
        """End the process; kill it if it is still working after a second. Safe to call twice."""
        self._closed = True
        actor = self._actor
        if actor is not None and self._gate.is_empty_within(_AT_WORK_S):
            wait([actor.call("close")], _CLOSE_S)
        self._lose()

    def _call(self, method: str, rows: list[object], *, alone: bool = False) -> list[object]:
        with self._gate.passed(alone=alone) as others:
            if self._closed:
                raise EngineDeadError("the engine is closed; create a new one")
            try:
                actor = self._start()
            except (HeadraceError, OSError) as error:
                raise EngineDeadError(f"the model cannot be loaded again: {text_of(error)}") from error
            answer = actor.call("answer", method, rows)
            if not wait([answer], self._timeout_s).done:
                self._lose(actor)
                raise ProcessTimeoutError(
                    f"there was no result after {self._timeout_s:g} s, and the process was killed"
                )
            kind = SharedDeathError if others() else WorkerDiedError
            try:
                reply: _Reply = answer.result()
                results = unpack(reply.results)
                if self._meter is not None:
                    self._meter.update(actor, reply)
                if (dead := next((one for one in results if isinstance(one, EngineDeadError)), None)) is not None:
                    raise dead
            except (WorkerDiedError, EngineDeadError) as error:  # a new process can continue
                self._lose(actor)
                said = str(error) if isinstance(error, WorkerDiedError) else f"the engine failed: {error}"
                raise kind(said) from error
        return results

    def _start(self) -> ActorProcess:
        with self._starting:
            if self._actor is None:
                actor = ActorProcess(_Host, *self._arguments)
                with ExitStack() as undo:
                    undo.callback(actor.kill)
                    try:
                        self._facts: _Facts = actor.call("load").result()
                    except (WorkerDiedError, EngineDeadError) as error:
                        raise EngineError(f"the engine cannot be loaded: {error} before it was ready") from error
                    undo.pop_all()
                self._actor = actor
            return self._actor

    def _lose(self, actor: ActorProcess | None = None) -> None:
        with self._starting:
            lost = self._actor
            if lost is not None and actor in (None, lost):
                self._actor = None
                lost.kill()

    def _ask(self, method: str, *arguments: object) -> object:
        """A fact of the running process; None where it has ended."""
        actor = self._actor
        if actor is None:
            return None
        answer = actor.call(method, *arguments)
        return answer.result() if wait([answer], _ASK_S).done and answer.exception() is None else None


class _Gate:
    """Lets calls in together, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._waiting_alone = 0
        self._alone = False

    @contextmanager
    def passed(self, *, alone: bool) -> Iterator[Callable[[], bool]]:
        """Within the body, the call is inside; yields whether others have been there with it."""
        with self._changed:
            if alone:
                self._waiting_alone += 1
                self._changed.wait_for(lambda: not self._inside)
                self._waiting_alone -= 1
                self._alone = True
            else:
                self._changed.wait_for(lambda: not (self._alone or self._waiting_alone))
            self._inside += 1
        try:
            yield lambda: self._inside > 1
        finally:
            with self._changed:
                self._inside -= 1
                self._alone = False
                self._changed.notify_all()

    def is_empty_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, seconds)


class _RemotePeaks(PeakMeter):
    def __init__(self, ask: Callable[..., object]) -> None:
        self._ask = ask
        self.last: tuple[int, ...] = ()

    def restart(self) -> bool:
        found = self._ask("restart_peaks")
        self.last = found if isinstance(found, tuple) else ()
        return bool(self.last)

    def peak(self) -> int | None:
        return max(self.last, default=None)

    def peaks(self) -> tuple[int, ...]:
        return self.last


class _RemoteMeter(ForwardMeter):
    """The forward passes in the process, and in those before it."""

    def __init__(self, gpu: str, device: str, has_memory: bool, ask: Callable[..., object]) -> None:
        super().__init__(None, gpu, self._memory if has_memory else None, device)
        self._ask = ask
        self._peaks = _RemotePeaks(ask)
        self._last: tuple[ActorProcess | None, Forwarded] = (None, Forwarded())

    def update(self, actor: ActorProcess, reply: _Reply) -> None:
        """Count what a process has done until this answer."""
        if reply.forwarded is None:
            return
        self._peaks.last = reply.peaks
        self.no_graphs = reply.no_graphs
        with self._lock:
            before = self._last[1] if self._last[0] is actor else Forwarded()
            self._last = (actor, reply.forwarded)
            self._sum = self._sum.plus(reply.forwarded.since(before))

    def device_peaks(self, dtype: str) -> Mapping[str, float]:
        found = self._ask("device_peaks", dtype)
        return found if isinstance(found, dict) else {}

    def _memory(self) -> tuple[AvailableMemory, PeakMeter]:
        found = self._ask("memory_limit")
        return found if isinstance(found, AvailableMemory) else AvailableMemory(0, "unknown"), self._peaks


class _Host:
    """The engine in the child process; calls its methods, several at a time."""

    def __init__(self, task: str, model: str | Path | None, name: str | None, options: dict[str, object]) -> None:
        engine = registry.create(task, model, engine=name, **options)
        profile = profile_of(engine)
        batching, tunable = BATCHES.of(engine), TUNING.of(engine)
        if batching is None:
            engine.close()
            raise _no_batches(name or type(engine).__name__)
        self._engine = batching
        self._meter = tunable.forward_meter() if tunable else None
        self._memory: tuple[AvailableMemory, PeakMeter | None] = memory_of(engine)
        self._threads = {
            "forward": ThreadPoolExecutor(2 if profile.overlaps else 1, "headrace-forward"),
            "prepare": ThreadPoolExecutor(min(os.cpu_count() or 1, _PREPARERS), "headrace-prepare"),
        }
        self._facts = _Facts(
            replace(profile, followable=False, tokenizes=False, prepares_columns=False),  # it takes lists
            dict(engine.describe()),
            dict(tunable.hardware()) if tunable else {},
            dict(tunable.dtype_speeds()) if tunable else {},
            (self._meter.gpu, self._meter.device) if self._meter is not None else None,
            self._memory[1] is not None,
        )

    async def load(self) -> _Facts:
        return self._facts

    async def answer(self, method: str, rows: list[object]) -> _Reply:
        return await asyncio.get_running_loop().run_in_executor(self._threads[method], self._run, method, rows)

    async def memory_limit(self) -> AvailableMemory:
        self._memory = memory_of(self._engine)
        return self._memory[0]

    async def restart_peaks(self) -> tuple[int, ...]:
        meter = self._memory[1]
        return meter.peaks() if meter is not None and meter.restart() else ()

    async def device_peaks(self, dtype: str) -> Mapping[str, float]:
        meter = self._meter
        return {} if meter is None else await asyncio.to_thread(meter.device_peaks, dtype)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    def _run(self, method: str, rows: list[object]) -> _Reply:
        size = len(rows)  # the engine may change the list
        results = pack(checked_results(getattr(self._engine, method)(rows), size, f"the engine's {method}"))
        meter = self._meter
        if meter is None:
            return _Reply(results, None, ())
        peaks = self._memory[1].peaks() if self._memory[1] is not None else ()
        return _Reply(results, meter.read(), peaks, meter.no_graphs)


def _no_batches(name: str | None) -> ConfigError:
    return ConfigError(
        f"engine {name} takes requests one by one and cannot run in a child process; omit ``engine_process=True``"
    )
