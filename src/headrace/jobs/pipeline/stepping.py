"""The records of a job in an engine that works in steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.base import StepEngine
from headrace.errors import StoppedError
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.stages import Work, sound


class WorkSteps:
    """A `StepModel` of work: the engine sees its payload. What has not begun when the job is asked to stop does not."""

    def __init__(self, engine: StepEngine[Any, Any, Any], stop: StopRequest) -> None:
        self._engine = engine
        self._stop = stop
        self._work: dict[int, Work] = {}

    def span(self, record: Work) -> tuple[float, float]:
        """See `StepEngine.span`."""
        return self._engine.span(record.payload)

    def add(self, key: int, record: Work) -> None:
        """Let a record join the next step."""
        if self._stop.requested:
            raise StoppedError("the job was asked to stop")
        try:
            self._engine.add(key, record.payload)
        except StoppedError as error:
            raise sound(error) from error
        self._work[key] = record

    def step(self) -> Sequence[tuple[int, Any]]:
        """See `StepEngine.step`."""
        try:
            finished = self._engine.step()
        except StoppedError as error:
            raise sound(error) from error
        if not isinstance(finished, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in finished
        ):
            return finished  # whoever called says what is wrong with it
        for key, _ in finished:
            self._work.pop(key, None)
        return [(key, sound(result)) for key, result in finished]

    def needs(self, key: int) -> float:
        """See `StepEngine.needs`."""
        return self._engine.needs(key)

    def remove(self, key: int) -> Work | None:
        """Take a record out; what it goes on with later is work too."""
        payload = self._engine.remove(key)
        work = self._work.pop(key, None)
        return None if work is None or payload is None else work._replace(payload=payload)
