"""A loaded model that many use at once: one engine and one batcher on an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import randbits

from headrace.app.jobs.job import build_batcher, tuned_profile
from headrace.batching.batcher import Batcher
from headrace.engines.base import Engine, Placed, Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.events import Event, Listener
from headrace.jobs.pipeline.chunks import answers
from headrace.jobs.pipeline.infer import in_order, longest_first, streamed
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.prepare_calls import prepare_all
from headrace.jobs.pipeline.work import Work
from headrace.jobs.settings import JobSettings, Limits
from headrace.records import Record


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """Inputs of a model, prepared together."""

    entries: Sequence[Prepared[object] | Exception]
    """Each input, or its error."""
    work: list[Work]
    """Those without an error; the position of each is its place among the inputs."""


class RunningModel:
    """An engine and its batcher. Calls, streams, jobs, requests and units of a cluster's work all go to this batcher.

    Args:
        engine: closed by its owner.
    """

    def __init__(self, config: EngineConfig, engine: Engine, listener: Listener | None = None) -> None:
        self.config = config
        self.engine = engine
        self._listeners: list[Listener] = [] if listener is None else [listener]
        # What fails is tried again by a job, if at all.
        settings = JobSettings(source=None, sink="", config=config, limits=Limits(max_attempts=1))
        self.profile = tuned_profile(settings, engine)
        self.batcher: Batcher[Work, object] = build_batcher(settings, engine, StopRequest(), self.tell)

    def add(self, listener: Listener) -> None:
        """Send the events of the batcher to one more listener."""
        self._listeners.append(listener)

    @contextmanager
    def heard(self, listener: Listener) -> Iterator[None]:
        """Send the events of the batcher to one more listener while the body runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    def prepare(self, inputs: Sequence[object]) -> PreparedInputs:
        """Prepare some inputs. Blocks for as long as the engine's `prepare`; may be called on any thread.

        An exception in the place of an input stays as it is.

        Raises:
            BrokenOffError: the engine died.
        """
        asked = [self._placed(value) for value in inputs if not isinstance(value, Exception)]
        prepared = iter(prepare_all(self.engine, asked) if asked else ())
        entries = [value if isinstance(value, Exception) else next(prepared) for value in inputs]
        work = [
            Work(Record(place, None, None), None, entry.payload, entry.cost)
            for place, entry in enumerate(entries)
            if isinstance(entry, Prepared)
        ]
        return PreparedInputs(entries, work)

    def _placed(self, value: object) -> object:
        """Equal requests get different answers, unless they have a seed or a place of their own."""
        return Placed(value, randbits(64)) if self.profile.draws and not isinstance(value, Placed) else value

    async def outputs(self, inputs: PreparedInputs) -> list[object]:
        """The output of each input, or its error, in order. Runs on the loop of the batcher."""
        found: list[object] = [entry if isinstance(entry, Exception) else None for entry in inputs.entries]
        orders = in_order if self.profile.caches_prefixes else longest_first
        async for run, outputs, _ in answers(self.batcher, streamed(orders(inputs.work))):
            for item, output in zip(run, outputs, strict=True):
                found[item.record.position] = output
        return found
