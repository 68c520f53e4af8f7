"""Engines with bad days, that the command line can name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.columns import Column, PayloadList, PreparedColumn
from headrace.engines.profile import EngineProfile, from_attributes
from headrace.errors import EngineDeadError, RecordError, TransientError
from headrace.testing import FakeEngine


def flaky(model: str | None = None) -> FakeEngine:
    """Refuses one text in a hundred as long as a file `bad` is beside its input."""
    bad = Path("bad").exists()
    return FakeEngine(
        model, refuses=lambda text: RecordError("a bad day") if bad and int(text.split()[1]) % 100 == 7 else None
    )


def down(model: str | None = None) -> FakeEngine:
    """Its store is away."""
    return FakeEngine(model, refuses=lambda text: ConnectionError("the store is away"))


class _Dying(FakeEngine):
    def forward(self, batch: list[str]) -> list[list[float]]:
        if len(self.batch_sizes) > 3:
            raise EngineDeadError("out of order")
        return super().forward(batch)


def dying(model: str | None = None) -> FakeEngine:
    """Works for a while."""
    return _Dying(model)


class _Poisoned(FakeEngine):
    """Chokes on some texts for good; and one call in ten fails at first, so that records end far from input order."""

    calls = 0
    failed: frozenset[str] = frozenset()

    def forward(self, batch: list[str]) -> list[list[float]]:
        self.calls += 1
        if self.calls % 10 == 0 and self.failed.isdisjoint(batch):  # no text a second time
            self.failed |= set(batch)
            raise TransientError("not now")
        return super().forward(batch)


def poisoned(model: str | None = None) -> FakeEngine:
    """For `scripts/torture`."""
    return _Poisoned(model, refuses=_poison)


def _poison(text: str) -> Exception | None:
    return RecordError("it is poison") if text.startswith("poison") else None


class _PoisonedColumns(_Poisoned):
    """The same by the block, with an array for the vectors of a batch."""

    @property
    def profile(self) -> EngineProfile:
        return replace(from_attributes(self), prepares_columns=True)

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        import numpy as np

        prepared = self.prepare(inputs.to_pylist() if hasattr(inputs, "to_pylist") else inputs)
        errors = {row: one for row, one in enumerate(prepared) if isinstance(one, Exception)}
        costs = np.array([1 if isinstance(one, Exception) else one.cost for one in prepared], np.int64)
        texts = ["" if isinstance(one, Exception) else one.payload for one in prepared]
        return PreparedColumn(PayloadList(texts, sum(map(len, texts))), costs, errors)

    def forward(self, batch: list[str]) -> Any:
        import numpy as np

        return np.array(super().forward(batch))


def poisoned_columns(model: str | None = None) -> FakeEngine:
    """For `scripts/torture --columns`."""
    return _PoisonedColumns(model, refuses=_poison)


class _Slow(FakeEngine):
    def forward(self, batch: list[str]) -> list[list[float]]:
        time.sleep(0.01 * len(batch))
        return super().forward(batch)


def slow(model: str | None = None) -> FakeEngine:
    """Computes 100 records a second."""
    return _Slow(model)


class _Sharing(_Poisoned):
    """Reads the common beginning of texts once, so that a job puts those that begin alike together."""

    @property
    def profile(self) -> EngineProfile:
        return EngineProfile(batching="batches", batch_cost=4096, batch_size=64, workers_cache_prefixes=True)


def sharing(model: str | None = None) -> FakeEngine:
    """Like `poisoned`, for `scripts/torture --task generate`."""
    return _Sharing(model, refuses=lambda text: RecordError("it is poison") if "poison" in text else None)


def logged(model: str | None = None) -> FakeEngine:
    """`poisoned`, which notes that its model was loaded."""
    _note(model)
    return poisoned(model)


def asked(model: str | None = None) -> Callable[[list[str]], list[str]]:
    """Repeats the end of each prompt, and notes that its model was loaded."""
    _note(model)

    def answer(prompts: list[str]) -> list[str]:
        time.sleep(0.01)
        return [prompt[-40:] for prompt in prompts]

    return answer


def _note(model: str | None) -> None:
    with Path(os.environ["HEADRACE_TEST_LOADS"]).open("a") as log:
        log.write(f"{os.getpid()} {model}\n")
