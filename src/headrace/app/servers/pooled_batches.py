"""Keeps a model of a pool loaded while batches use it, behind requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.app.servers.batch_run import BulkModel
from headrace.errors import BrokenOffError, EngineDeadError, EngineError
from headrace.pool.pool import ModelPool

logger = logging.getLogger("headrace")

_GIVE_UP_S = 600.0
"""Seconds for which a batch tries again to load a model that cannot be loaded."""


class UseOfPool:
    """Lets the batches of a model use it."""

    def __init__(self, pool: ModelPool, model: BulkModel) -> None:
        self._pool = pool
        self._model = model
        self._failing_since: float | None = None

    @asynccontextmanager
    async def use(self, leave: Callable[[], None]) -> AsyncIterator[None]:
        """Wait until the model is loaded, and keep it loaded until `leave` is called and the context ends.

        Raises:
            BrokenOffError: it cannot be loaded now.
            HeadraceError: it cannot be loaded at all, or has not been for some time.
        """
        name, now = self._model.server.name, asyncio.get_running_loop().time
        using = self._pool.use_in_background(name, leave)
        try:
            await using.__aenter__()
        except EngineError as error:
            self._failing_since = now() if self._failing_since is None else self._failing_since
            if now() - self._failing_since > _GIVE_UP_S:
                raise
            raise BrokenOffError(str(error)) from error
        self._failing_since = None
        try:
            yield
        except BrokenOffError as error:
            if _is_dead(error):
                logger.error("the engine of model %r died; the model is loaded again for the batch", name)
                self._pool.unload(name)
            raise
        finally:
            await using.__aexit__(None, None, None)


def _is_dead(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, EngineDeadError):
            return True
        error = error.__cause__
    return False
