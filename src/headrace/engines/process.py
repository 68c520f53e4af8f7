"""object engine that runs batches, in a process of its own: a crash or a hang costs the record that caused it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.batching.pending import checked_results
from headrace.engines import registry
from headrace.engines.base import AnyBatchEngine, Prepared
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError, EngineDeadError, EngineError, HeadraceError, WorkerDiedError, text_of
from headrace.processes.child import ChildProcess
from headrace.processes.culprits import CrashIsolation

_AT_WORK_S = 1.0
"""How long to wait for the end of a call before its process is killed."""
_REFUSED = frozenset({"vllm", "endpoint"})
"""Engines known to run no batches: refused before a model is loaded."""


class ProcessEngine:
    """The engine that `registry.create` would make, in a child process; satisfies `BatchEngine`.

    If the process dies in a batch, or is killed because the batch took too long, it is started again with its model,
    and the batch is tried again in portions until the record that caused it is alone. Records are prepared in the same
    process, between batches.

    Args:
        task: see `registry.create`, as `model`, `engine` and `options`.
        timeout_s: most seconds to prepare a batch, and to run one; None for no limit.

    Raises:
        ConfigError: also an engine that runs no batches.
        EngineError: also a process that ends while it loads the model.
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
                "engine_process needs an engine by name: pass module:name instead of the function or object itself, so "
                "that the process can import it"
            )
        if engine in _REFUSED:
            raise _no_batches(engine)
        self._child = ChildProcess(_Host, task, model, engine, dict(options or {}))
        self._closed = False
        self._turn = threading.Lock()
        try:
            facts: tuple[EngineProfile, Mapping[str, object]] = self._child.start()
        except EngineDeadError as error:
            raise EngineError(f"the engine cannot be loaded: {error}") from error
        self.profile, self._description = facts
        self._prepare = CrashIsolation(lambda rows: self._call("prepare", rows, timeout_s))
        self._prepare_rows = self.profile.batch_size if timeout_s is not None else None
        self._forward = CrashIsolation(lambda rows: self._call("forward", rows, timeout_s))

    def describe(self) -> Mapping[str, object]:
        """As the engine itself does: a job can begin with the engine in this process and go on with it in another."""
        return self._description

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """What the engine makes of the inputs; a WorkerDiedError for one that ends the process."""
        rows = self._prepare_rows or max(1, len(inputs))  # the limit is that of a batch
        with self._turn:
            pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
            return [result for piece in pieces for result in self._prepare.results(piece)]

    def forward(self, batch: list[object]) -> list[object]:
        """What the engine returns; for a record that ends the process or blocks it, an exception.

        Raises:
            EngineDeadError: the model cannot be loaded again, or record after record ends the process.
        """
        with self._turn:
            return self._forward.results(batch)

    def close(self) -> None:
        """End the process, at once if it is at work. Safe to call twice."""
        self._closed = True
        if self._turn.acquire(timeout=_AT_WORK_S):
            self._turn.release()
            self._child.close()
        else:
            self._child.kill()

    def _call(self, method: str, rows: list[object], timeout_s: float | None) -> list[object]:
        if self._closed:
            raise EngineDeadError("the engine is closed; create a new one")
        try:
            self._child.start()
        except Exception as error:
            raise EngineDeadError(f"the model cannot be loaded again: {text_of(error)}") from error
        try:
            results = self._child.call((method, rows), timeout_s)
        except EngineDeadError as error:  # another process can go on where this one cannot
            self._child.kill()
            raise WorkerDiedError(f"the engine could not go on: {error}") from error
        dead = next((result for result in results if isinstance(result, EngineDeadError)), None)
        if dead is not None:
            self._child.kill()
            raise WorkerDiedError(f"the engine could not go on: {dead}")
        return results


class _Host:
    """The engine in its process, and how its methods are called."""

    def __init__(self, task: str, model: str | Path | None, name: str | None, options: dict[str, object]) -> None:
        try:
            engine = registry.create(task, model, engine=name, **options)
        except (HeadraceError, OSError):
            raise
        except BaseException as error:  # a user's own factory may raise anything
            words = " ".join(text_of(error).split())
            raise EngineError(f"the engine cannot be loaded: {type(error).__name__}: {words}") from error
        profile = profile_of(engine)
        if profile.batching != "batches":
            engine.close()
            raise _no_batches(name or type(engine).__name__)
        self._engine: AnyBatchEngine = engine
        self.facts = replace(profile, followable=False), dict(engine.describe())

    def __call__(self, request: tuple[str, list[object]]) -> list[object]:
        method, rows = request
        return checked_results(getattr(self._engine, method)(rows), len(rows), f"the engine's {method}")

    def close(self) -> None:
        self._engine.close()


def _no_batches(name: str | None) -> ConfigError:
    return ConfigError(
        f"engine {name} takes requests one by one and cannot run in a process of its own; leave out --engine-process"
    )
