"""Engines that the command line can name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headrace.testing import FakeEngine


def slow(model: str | None = None, **options: Any) -> FakeEngine:
    """Some seconds for a few thousand texts."""
    return FakeEngine(model, seconds_per_batch=0.1, **options)


def stuck(model: str | None = None, **options: Any) -> FakeEngine:
    """A batch that does not end."""

    def wait(seconds: float) -> None:
        Path("stuck").touch()
        time.sleep(600)

    return FakeEngine(model, sleep=wait, seconds_per_batch=1, **options)


def loading(model: str | None = None) -> FakeEngine:
    """A model that loads for ever."""
    Path("loading").touch()
    time.sleep(600)
    return FakeEngine(model)


def broken(model: str | None = None) -> FakeEngine:
    """A factory with a bug."""
    raise KeyError("weights")


class Steady(FakeEngine):
    """40,000 words a second, however fast the machine is."""

    def forward(self, batch: list[str]) -> list[list[float]]:
        time.sleep(sum(len(text.split()) for text in batch) / 40_000)
        return super().forward(batch)
