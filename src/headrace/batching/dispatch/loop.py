"""What the dispatcher of batches and the scheduler of steps have in common."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from headrace.batching.dispatch.admission import Admission
from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.options import Options
from headrace.batching.pending import fail
from headrace.batching.policy.waiting_queue import WaitingQueue
from headrace.batching.stats import BatchMeter
from headrace.errors import StoppedError
from headrace.events import Event

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """What a submission and its dispatcher share."""

    queue: WaitingQueue
    admission: Admission
    wakeup: Wakeup
    meter: BatchMeter
    options: Options


class DispatchLoop(ABC):
    """Takes records from the queue and resolves each of them. It sleeps on the shared `wakeup`."""

    def __init__(self, context: DispatchContext) -> None:
        self._queue = context.queue
        self._admission = context.admission
        self._wakeup = context.wakeup
        self._meter = context.meter
        self._options = context.options
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._draining = self._ended = False

    async def run(self) -> None:
        """Serve until drained. However this task ends, no caller is left waiting."""
        name = self._options.name
        cause: BaseException = StoppedError(f"{name} stopped before this record was processed")
        try:
            await self._serve()
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as exc:
            logger.critical("%s failed; all its waiting records fail too", name, exc_info=exc)
            cause = exc
            raise
        finally:
            self._abandon(cause)

    @abstractmethod
    async def _serve(self) -> None: ...

    @abstractmethod
    def _abandon(self, cause: BaseException) -> None:
        """Fail all records that are left."""

    @abstractmethod
    def arrived(self, cost: float) -> None:
        """A record was queued while the loop slept."""

    @abstractmethod
    def flush(self) -> None:
        """Dispatch the records that wait now without waiting for more."""

    def drain(self) -> None:
        """End once nothing waits or runs."""
        self._draining = True
        self._wakeup.wake()

    def refuse(self, cause: BaseException) -> None:
        """Fail all records that wait for a batch or for room."""
        self._admission.refuse_all(cause)
        self._fail_waiting(cause)

    @abstractmethod
    def end(self) -> None:
        """Release everything; what still runs is abandoned and not reported."""

    def _fail_waiting(self, cause: BaseException) -> None:
        self._meter.left += self._queue.size
        fail(self._queue.clear(), cause)

    @property
    def _left_behind(self) -> bool:
        return self._ended or self._loop.is_closed()

    def _emit(self, event: Callable[..., Event], *fields: object) -> None:
        """Schedule the listener on the event loop; if it raises, the loop reports it and no record fails."""
        if self._options.listener is not None and not self._left_behind:
            self._loop.call_soon(self._options.listener, event(*fields))
