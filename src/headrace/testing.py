"""Test doubles of engines that satisfy the same contracts, and checks that stores keep theirs."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile, from_attributes
from headrace.errors import ConfigError, EngineDeadError, RecordError
from headrace.io.sinks.tables import TableStore
from headrace.records import text_refusal


class _ProfileFromAttributes:
    @property
    def profile(self) -> EngineProfile:
        """The profile, from attributes that a subclass or a test may change."""
        return from_attributes(self)


class FakeEngine(_ProfileFromAttributes):
    """An embedding engine without a model: each vector depends only on its text.

    A text costs its number of words. It satisfies `headrace.engines.base.BatchEngine`.

    Args:
        model: changes the vectors.
        dimension: length of a vector.
        seconds_per_batch: how long `forward` takes.
        max_model_len: longer texts are truncated to this many words; None truncates none.
        on_too_long: "truncate", or "error" to fail the record instead.
        refuses: returns the exception that `forward` raises for a text, or None.
        sleep: waits.

    Raises:
        ConfigError: `on_too_long` has another value.
    """

    pads = True
    default_batch_cost = 4096
    default_batch_size = 256

    def __init__(  # noqa: PLR0913 - one knob for each behaviour a test needs
        self,
        model: str | None = None,
        *,
        dimension: int = 8,
        seconds_per_batch: float = 0.0,
        max_model_len: int | None = None,
        on_too_long: str = "truncate",
        refuses: Callable[[str], Exception | None] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if on_too_long not in ("truncate", "error"):
            raise ConfigError(f"on_too_long is {on_too_long!r}; the fake engine takes 'truncate' or 'error'")
        self._model = model or "fake"
        self._dimension = dimension
        self._seconds = seconds_per_batch
        self._max_words = max_model_len
        self._on_too_long = on_too_long
        self._refuses = refuses
        self._sleep = sleep
        self._forward = threading.Lock()
        self.batch_sizes: list[int] = []
        """Texts in each `forward`, in the order of the calls."""
        self.closed = False

    def describe(self) -> Mapping[str, object]:
        """What determines the vectors."""
        return {
            "engine": "fake",
            "model": self._model,
            "dimension": self._dimension,
            "max_model_len": self._max_words,
            "on_too_long": self._on_too_long,
        }

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[str] | Exception]:
        """The texts, truncated if too long."""
        return [self._prepare(text) for text in inputs]

    def _prepare(self, text: object) -> Prepared[str] | Exception:
        if refusal := text_refusal(text):
            return refusal
        assert isinstance(text, str), "all others are refused"
        words = text.split()
        if self._max_words is None or len(words) <= self._max_words:
            return Prepared(text, max(len(words), 1))
        if self._on_too_long == "error":
            return RecordError(f"the text has {len(words)} words, more than the {self._max_words} allowed")
        return Prepared(" ".join(words[: self._max_words]), self._max_words, truncated=True)

    def forward(self, batch: list[str]) -> list[list[float]]:
        """One vector per text.

        Raises:
            RuntimeError: called while another call runs.
            EngineDeadError: the engine is closed.
        """
        if self.closed:
            raise EngineDeadError("the engine is closed; create a new one")
        if not self._forward.acquire(blocking=False):
            raise RuntimeError("forward was called while another call runs")
        try:
            self.batch_sizes.append(len(batch))
            if self._seconds:
                self._sleep(self._seconds)
            for text in batch if self._refuses else ():
                if self._refuses and (error := self._refuses(text)) is not None:
                    raise error
            return [self.vector(text) for text in batch]
        finally:
            self._forward.release()

    def vector(self, text: str) -> list[float]:
        """The vector of a text that is not truncated: numbers in 0..1, exact in float32."""
        digest = hashlib.shake_128(f"{self._model}\0{text}".encode()).digest(self._dimension)
        return [byte / 256 for byte in digest]

    def close(self) -> None:
        """Record that the engine was closed."""
        self.closed = True


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A text, and how many steps of its answer were taken before an eviction."""

    text: str
    taken: int = 0


class FakeStepEngine(_ProfileFromAttributes):
    """A generator without a model: it repeats a text's words, one per step.

    A text of n words costs n at first, and one more for each word of the answer. It satisfies
    `headrace.engines.base.StepEngine`.

    Args:
        max_slots: maximum texts at a time.
        max_cost: maximum total cost.
        most: maximum words of an answer.
        fails: called with the texts of each step; returns the exception to raise, or None.
        before_step: called on the engine's thread before each step.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        max_slots: int = 8,
        max_cost: int = 1024,
        most: int = 64,
        fails: Callable[[list[str]], BaseException | None] | None = None,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = model or "fake"
        self.max_slots = max_slots
        self.max_cost = max_cost
        self._most = most
        self._fails = fails
        self._before_step = before_step
        self._requests: dict[int, FakeRequest] = {}
        self._using = threading.Lock()
        self.steps: list[list[str]] = []
        """The texts in each step."""
        self.removed: list[str] = []
        """The texts that were removed before they finished."""
        self.closed = False

    def describe(self) -> Mapping[str, object]:
        """What determines the answers."""
        return {"engine": "fake_steps", "model": self._model, "most": self._most}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[FakeRequest] | Exception]:
        """Accepts texts of at least one word."""
        return [
            Prepared(FakeRequest(text), len(text.split()))
            if isinstance(text, str) and text.split()
            else RecordError(f"the prompt is {text!r}; it must be a text of at least one word")
            for text in inputs
        ]

    def span(self, record: FakeRequest) -> tuple[float, float]:
        """The words of the text, without and with the longest answer."""
        return len(record.text.split()) + 1, len(record.text.split()) + self._most

    def add(self, key: int, record: FakeRequest) -> None:
        """Add a text to the next step."""
        if len(self._requests) == self.max_slots:
            raise RuntimeError(f"there are {self.max_slots} texts already, which is max_slots")
        self._requests[key] = record

    def step(self) -> list[tuple[int, str | Exception]]:
        """Generate one word for every text.

        Raises:
            RuntimeError: called while another call runs.
            EngineDeadError: the engine is closed.
        """
        if self.closed:
            raise EngineDeadError("the engine is closed; create a new one")
        if not self._using.acquire(blocking=False):
            raise RuntimeError("step was called while another call runs")
        try:
            self._before_step()
            texts = [request.text for request in self._requests.values()]
            self.steps.append(texts)
            if self._fails is not None and (error := self._fails(texts)) is not None:
                raise error
            self._requests = {
                key: FakeRequest(request.text, request.taken + 1) for key, request in self._requests.items()
            }
            ended = {
                key: request.text
                for key, request in self._requests.items()
                if request.taken >= len(self.answer(request.text).split())
            }
            for key in ended:
                del self._requests[key]
            return [(key, self.answer(text)) for key, text in ended.items()]
        finally:
            self._using.release()

    def answer(self, text: str) -> str:
        """The whole answer to a text."""
        return " ".join(text.split()[: self._most])

    def needs(self, key: int) -> float:
        """The words of the text and the answer, including the next word."""
        request = self._requests[key]
        return len(request.text.split()) + request.taken + 1

    def remove(self, key: int) -> FakeRequest | None:
        """Remove a text; it resumes from its last word."""
        request = self._requests.pop(key, None)
        if request is not None:
            self.removed.append(request.text)
        return request

    def close(self) -> None:
        """Record that the engine was closed."""
        self.closed = True


class FakeStreamEngine(_ProfileFromAttributes):
    """An embedding engine that batches by itself: the vectors of `FakeEngine`, one request at a time.

    It satisfies `headrace.engines.base.StreamEngine`.

    Args:
        max_in_flight: requests in flight at the same time.
        seconds: how long each request takes.
        sleep: waits.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        max_in_flight: int = 8,
        seconds: float = 0.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._texts = FakeEngine(model)
        self.max_in_flight = max_in_flight
        self._seconds = seconds
        self._sleep = sleep
        self.in_flight = 0
        self.most_in_flight = 0
        """Maximum number of concurrent requests so far."""

    def describe(self) -> Mapping[str, object]:
        """What determines the vectors."""
        return {**self._texts.describe(), "engine": "fake_stream"}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[str] | Exception]:
        """The unchanged texts."""
        return self._texts.prepare(inputs)

    async def infer(self, payload: str) -> list[float]:
        """The vector of one text. Raises EngineDeadError: the engine is closed."""
        if self._texts.closed:
            raise EngineDeadError("the engine is closed; create a new one")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._sleep(self._seconds)
            return self._texts.vector(payload)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Record that the engine was closed."""
        self._texts.close()


def check_table_store(make: Callable[[], TableStore], read: Callable[[], Iterable[Mapping[str, object]]]) -> None:
    """Check that a store keeps the contract of `headrace.io.sinks.tables.TableStore`, in a table that is not there yet.

    Args:
        make: opens the table; each call is as a new process.
        read: all rows of the table, by the store's own client.

    Raises:
        AssertionError: it does not; the message says what it must do.
    """
    columns = ("id", "text", "embedding")

    def put(store: TableStore, ids: Sequence[object], text: str) -> None:
        store.put([{"id": one, "text": text, "embedding": [1.0, 0.5]} for one in ids])

    def found() -> dict[object, object]:
        rows = list(read())
        assert len(rows) == len({row["id"] for row in rows}), "put must replace the row with an id, not add another"
        return {row["id"]: row["text"] for row in rows}

    first = make()
    assert first.count(columns) is None, "count must be None before the table is there"
    put(first, ["a", "b"], "first")
    put(first, ["b", "c"], "second")
    first.close()
    assert found() == {"a": "first", "b": "second", "c": "second"}, "put must insert rows, or replace those of an id"
    again = make()  # the process was killed between putting a part and recording it: the part is put again
    assert again.count(columns), "count must be more than 0 for a table with rows"
    put(again, ["b", "c"], "third")
    again.close()
    assert found() == {"a": "first", "b": "third", "c": "third"}, "put must keep what an earlier process has put"
    put(again, ["d"], "fourth")
    again.close()
    assert found()["d"] == "fourth", "a call after close must connect again"
