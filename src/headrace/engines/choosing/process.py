"""Run a batch engine in a child process: a crash or hang fails only the record that caused it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.batching.results import checked_results
from headrace.engines.base import Prepared
from headrace.engines.capabilities import BATCHES, TUNING
from headrace.engines.choosing import registry
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError, EngineDeadError, EngineError, HeadraceError, WorkerDiedError, text_of
from headrace.processes.child import ChildProcess
from headrace.processes.crash_isolation import CrashIsolation

_AT_WORK_S = 1.0
"""How long `close` waits for a running call before it kills the process."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the process says of its engine once that is loaded."""

    profile: EngineProfile
    description: Mapping[str, object]
    hardware: Mapping[str, object]
    dtype_speeds: Mapping[str, float]


class ProcessEngine:
    """The engine that `registry.create` returns, in a child process; satisfies `BatchEngine`.

    If the process dies in a batch, or is killed at the timeout, it restarts with its model, and parts of the batch are
    retried until the record that caused it is isolated. The same process prepares records between batches.

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
        self._child = ChildProcess(_Host, task, model, engine, dict(options or {}))
        self._closed = False
        self._turn = threading.Lock()
        try:
            facts: _Facts = self._child.start()
        except EngineDeadError as error:
            raise EngineError(f"the engine cannot be loaded: {error}") from error
        self.profile, self._facts = facts.profile, facts
        self._prepare = CrashIsolation(lambda rows: self._call("prepare", rows, timeout_s))
        self._prepare_rows = self.profile.batch_size if timeout_s is not None else None
        self._forward = CrashIsolation(lambda rows: self._call("forward", rows, timeout_s))

    def hardware(self) -> Mapping[str, object]:
        """What decides how fast the engine in the process is."""
        return self._facts.hardware

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device is in other types."""
        return self._facts.dtype_speeds

    def forward_meter(self) -> None:
        """None: the passes are in the other process."""

    def describe(self) -> Mapping[str, object]:
        """The engine's own description: a job can start in this process and resume in a child process."""
        return self._facts.description

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The engine's results; a WorkerDiedError for an input that ends the process."""
        rows = self._prepare_rows or max(1, len(inputs))  # the time limit is per batch
        with self._turn:
            pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
            return [result for piece in pieces for result in self._prepare.results(piece)]

    def forward(self, batch: list[object]) -> list[object]:
        """The engine's results; an exception for a record that ends or blocks the process.

        Raises:
            EngineDeadError: the model cannot be loaded again, or too many records in a row end the process.
        """
        with self._turn:
            return self._forward.results(batch)

    def close(self) -> None:
        """End the process; kill it if it is still working after a second. Safe to call twice."""
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
        except (HeadraceError, OSError) as error:
            raise EngineDeadError(f"the model cannot be loaded again: {text_of(error)}") from error
        try:
            results = self._child.call((method, rows), timeout_s)
        except EngineDeadError as error:  # a new process can continue
            self._child.kill()
            raise WorkerDiedError(f"the engine failed: {error}") from error
        dead = next((result for result in results if isinstance(result, EngineDeadError)), None)
        if dead is not None:
            self._child.kill()
            raise WorkerDiedError(f"the engine failed: {dead}")
        return results


class _Host:
    """The engine in the child process; calls its methods."""

    def __init__(self, task: str, model: str | Path | None, name: str | None, options: dict[str, object]) -> None:
        engine = registry.create(task, model, engine=name, **options)
        profile = profile_of(engine)
        batching, tunable = BATCHES.of(engine), TUNING.of(engine)
        if batching is None:
            engine.close()
            raise _no_batches(name or type(engine).__name__)
        self._engine = batching
        self.facts = _Facts(
            # It takes one call at a time, and lists.
            replace(profile, followable=False, tokenizes=False, overlaps=False, prepares_columns=False),
            dict(engine.describe()),
            dict(tunable.hardware()) if tunable else {},
            dict(tunable.dtype_speeds()) if tunable else {},
        )

    def __call__(self, request: tuple[str, list[object]]) -> list[object]:
        method, rows = request
        size = len(rows)  # the engine may change the list
        return checked_results(getattr(self._engine, method)(rows), size, f"the engine's {method}")

    def close(self) -> None:
        self._engine.close()


def _no_batches(name: str | None) -> ConfigError:
    return ConfigError(
        f"engine {name} takes requests one by one and cannot run in a child process; omit ``engine_process=True``"
    )
