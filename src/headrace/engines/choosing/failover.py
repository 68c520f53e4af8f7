"""Goes on in a child process when the device of this process is lost, as after a device-side assert on a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.device_errors import is_device_lost
from headrace.engines.base import BatchEngine
from headrace.engines.capabilities import BATCHES, TUNING
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine
from headrace.errors import EngineDeadError, first_line

logger = logging.getLogger("headrace")


class FailoverForward:
    """An engine's `forward`. Every call fails once CUDA's context is lost, and only a new process has another.

    While all is well, batches pay nothing for it.

    Args:
        reload: loads the same model in a child process.
    """

    def __init__(self, engine: BatchEngine, reload: Callable[[], BatchEngine]) -> None:
        self._engine = engine
        self._reload = reload
        self._lock = threading.Lock()
        self._child: BatchEngine | None = None

    def __call__(self, batch: list[object]) -> Sequence[object]:
        """The results of a batch.

        Raises:
            EngineDeadError: the engine is gone, and cannot be loaded in a child process either.
        """
        child = self._child
        if child is None:
            try:
                return self._engine.forward(batch)
            except EngineDeadError as error:
                if not is_device_lost(error.__cause__ or error):
                    raise
                child = self._reloaded(error)
        return child.forward([batch[row] for row in range(len(batch))])

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def _reloaded(self, error: EngineDeadError) -> BatchEngine:
        with self._lock:
            if self._child is None:
                logger.warning("%s; the job goes on in a child process, which loads the model again", first_line(error))
                self._child = self._reload()
            return self._child


def with_failover(engine: object, config: EngineConfig) -> FailoverForward | None:
    """Calls of an engine of this process; None if it is not on a GPU, or could not be loaded in a child process.

    Args:
        config: loads it again, in the same dtype.
    """
    batching, tunable = BATCHES.of(engine), TUNING.of(engine)
    by_name = config.engine is None or isinstance(config.engine, str)
    if batching is None or tunable is None or config.engine_process or not by_name:
        return None
    if tunable.hardware().get("device", "cpu") == "cpu":
        return None

    def reload() -> BatchEngine:
        child = BATCHES.of(load_engine(replace(config, engine_process=True, engine_timeout_s=None)))
        assert child is not None, "it is the engine that ran batches"
        return child

    return FailoverForward(batching, reload)
