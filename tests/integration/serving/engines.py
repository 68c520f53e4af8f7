"""Engines for servers under test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.waiting import until

from headrace.engines.base import PartialAnswer, Prepared
from headrace.engines.requests.answer_parts import AnswerReader
from headrace.engines.requests.chat_answers import with_parts
from headrace.engines.requests.generation import GeneratedText, Sampling, parse
from headrace.errors import EngineDeadError, EngineOutOfMemoryError
from headrace.testing import FakeEngine


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that a `Talker` answers."""

    words: tuple[str, ...]
    listener: Callable[[PartialAnswer], None] | None = None
    reader: AnswerReader | None = None
    """Takes the answers to requests with tools apart."""


class Talker:
    """A generator without a model: it says the last message's words again, one at each step, as a `StepEngine`.

    It takes requests as the real one does, and can be followed.
    """

    def __init__(self, model: str | None = None, *, slots: int = 16, step_s: float = 0.0) -> None:
        self.max_slots = slots
        self.max_cost = 1_000_000
        self.step_s = step_s
        self.steps = 0
        self.words_said = 0
        self._turns: dict[int, Turn] = {}
        self._said: dict[int, int] = {}

    def describe(self) -> dict[str, Any]:
        return {"engine": "talker"}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Turn] | Exception]:
        return [self._prepare(value) for value in inputs]

    def _prepare(self, value: Any) -> Prepared[Turn] | Exception:
        try:
            request = parse(value, Sampling())
        except ValueError as error:
            return error
        text = request.prompt if request.messages is None else request.messages[-1]["content"]
        words = str(text).split()[: request.sampling.max_tokens]
        reader = None if request.tools is None else AnswerReader(request.tools, "hermes", "deepseek_r1")
        return Prepared(Turn(tuple(words), reader=reader), max(len(words), 1))

    def follow(self, payload: Turn, listener: Callable[[PartialAnswer], None]) -> Turn:
        return replace(payload, listener=listener)

    def span(self, record: Turn) -> tuple[float, float]:
        return 1, len(record.words) + 1

    def add(self, key: int, record: Turn) -> None:
        self._turns[key], self._said[key] = record, 0

    def step(self) -> list[tuple[int, GeneratedText | Exception]]:
        time.sleep(self.step_s)
        self.steps += 1
        ended: list[tuple[int, GeneratedText | Exception]] = []
        for key, turn in list(self._turns.items()):
            self._said[key] += 1
            self.words_said += 1
            said = turn.words[: self._said[key]]
            text, count, ends = " ".join(said), len(said), len(said) == len(turn.words)
            parts = None if turn.reader is None else turn.reader.parts(text, ended=ends)
            if turn.listener is not None:
                turn.listener(text if parts is None else parts)
            if ends:
                answer = GeneratedText(text=text, finish_reason="stop", prompt_tokens=count, completion_tokens=count)
                ended.append((key, answer if parts is None else with_parts(answer, parts)))
                self.remove(key)
        return ended

    def needs(self, key: int) -> float:
        return self._said[key] + 1

    def remove(self, key: int) -> Turn | None:
        self._said.pop(key, None)
        return self._turns.pop(key, None)

    def close(self) -> None:
        pass


class Held(FakeEngine):
    """Embeds once `go` is set."""

    def __init__(self, model: str | None = None) -> None:
        self.go = threading.Event()
        super().__init__(model, seconds_per_batch=1, sleep=lambda seconds: self.go.wait(60))


class Mortal(FakeEngine):
    """Dies of the word "die"."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, refuses=lambda text: EngineDeadError("the device is gone") if text == "die" else None)


class Gradual(FakeEngine):
    """A batch takes 20 ms."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, seconds_per_batch=0.02)


class SlowTalker(Talker):
    """A step takes 40 ms."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, slots=64, step_s=0.04)


class Gated(FakeEngine):
    """Embeds once there is a file `go` in the server's folder."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, seconds_per_batch=1, sleep=self._wait)

    def _wait(self, seconds: float) -> None:
        until(Path("go").exists)


class GatedLabeler(Gated):
    """Labels instead of vectors."""

    def forward(self, batch: Any) -> Any:
        return [{"label": "good", "score": 1.0} for _ in super().forward(batch)]


class Labels(FakeEngine):
    """Calls every text "fine", and takes three words of it."""

    max_model_len = 3

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model, max_model_len=3)

    def forward(self, batch: list[str]) -> list[Any]:
        return [{"label": "fine", "score": 1.0} for _ in super().forward(batch)]


class Reciter(Talker):
    """Says all messages of a chat."""

    def _prepare(self, value: Any) -> Prepared[Turn] | Exception:
        said = " ".join(str(message["content"]) for message in value["messages"])
        return super()._prepare({**value, "messages": [{"role": "user", "content": said}]})


class JsonTalker(Talker):
    """Answers everything with JSON: in a Markdown block, or as a call of the first tool."""

    def _prepare(self, value: Any) -> Prepared[Turn] | Exception:
        asked = super()._prepare(value)
        if isinstance(asked, Exception):
            return asked
        if (reader := asked.payload.reader) is None or reader.tools is None:
            return Prepared(Turn(('```json {"total":', "5}", "```")), 3)
        call = {"name": next(iter(reader.tools.schemas)), "arguments": {"total": 5}}
        return Prepared(Turn((f"<tool_call> {json.dumps(call)}", "</tool_call>"), reader=reader), 2)


class FromFolder(FakeEngine):
    """Needs a file `weights` in its folder, and has no memory for a batch with more than ten words."""

    def __init__(self, model: str) -> None:
        if not (Path(model) / "weights").exists():
            raise OSError(f"no weights in {model}")
        super().__init__(model, dimension=2)

    def forward(self, batch: list[str]) -> list[Any]:
        if sum(len(text.split()) for text in batch) > 10:
            raise EngineOutOfMemoryError("the device has no memory for this batch")
        return super().forward(batch)


class Sleepy(FakeEngine):
    """An engine that can sleep, and fails a batch that it gets then."""

    def __init__(self, model: str | None = None, *, dimension: int = 8) -> None:
        super().__init__(model, dimension=dimension, seconds_per_batch=0.01)
        time.sleep(0.05)  # a model that loads as fast as it wakes is not kept in host memory
        self.sleeper = self
        self.asleep = False

    def forward(self, batch: list[str]) -> list[list[float]]:
        assert not self.asleep
        return super().forward(batch)

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


def sets(texts: Sequence[str]) -> list[object]:
    """A model of a user whose outputs JSON has no word for; of "nan", one that it has another for."""
    return [float("nan") if text == "nan" else {text} for text in texts]
