"""Doubles that keep the same contracts as the real parts, for tests without a model."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.engines.base import Prepared
from headrace.errors import RecordError


class FakeEngine:
    """An embedding engine without a model: a vector that depends on the text alone.

    A text costs its number of words. It satisfies `headrace.engines.base.BatchEngine`.

    Args:
        model: part of the vectors: another model, other vectors.
        dimension: length of a vector.
        seconds_per_batch: how long `forward` takes.
        max_model_len: longer texts are cut to so many words; None cuts none.
        on_too_long: "truncate", or "error" to fail the record instead.
        refuses: texts for which `forward` raises, whatever else is in the batch.
        sleep: how to wait.
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
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
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

    def describe(self) -> Mapping[str, Any]:
        """What decides the vectors."""
        return {
            "engine": "fake",
            "model": self._model,
            "dimension": self._dimension,
            "max_model_len": self._max_words,
            "on_too_long": self._on_too_long,
        }

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[str] | Exception]:
        """The texts themselves, cut where they are too long."""
        return [self._prepare(text) for text in inputs]

    def _prepare(self, text: Any) -> Prepared[str] | Exception:
        if not isinstance(text, str):
            return RecordError(f"the input is of type {type(text).__name__}, not text")
        words = text.split()
        if self._max_words is None or len(words) <= self._max_words:
            return Prepared(text, max(len(words), 1))
        if self._on_too_long == "error":
            return RecordError(f"the text has {len(words)} words, more than the {self._max_words} allowed")
        return Prepared(" ".join(words[: self._max_words]), self._max_words, truncated=True)

    def forward(self, batch: list[str]) -> list[list[float]]:
        """One vector per text.

        Raises:
            RuntimeError: called while another call runs, which an engine need not stand.
        """
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
        """The vector of a text that is not cut: numbers in 0..1 that float32 holds exactly."""
        digest = hashlib.shake_128(f"{self._model}\0{text}".encode()).digest(self._dimension)
        return [byte / 256 for byte in digest]

    def close(self) -> None:
        """Nothing to free; remembers that it was called."""
        self.closed = True
