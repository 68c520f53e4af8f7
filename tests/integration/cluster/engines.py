"""Engines that workers load: some of them die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import DynamicBatcher, ReusablePool, reusable
from headrace.engines.capabilities import PrefixCacheStats
from headrace.engines.profile import EngineProfile
from headrace.errors import RecordError
from headrace.testing import FakeEngine


def lengths(texts: list[str]) -> list[int]:
    """As quick as can be."""
    return [len(text) for text in texts]


class Journal:
    """Writes down which process has done which text; waits as a GPU does."""

    def __init__(self, model: str) -> None:
        self._file = Path(model) / f"{os.getpid()}.txt"

    def run(self, texts: list[str]) -> list[int]:
        """Lengths."""
        time.sleep(0.004)
        with self._file.open("a") as file:
            file.writelines(f"{text}\n" for text in texts)
        return lengths(texts)


def journal(model: str) -> Callable[[list[str]], list[int]]:
    """Keeps a journal in the folder `model`."""
    return Journal(model).run


def deadly(texts: list[str]) -> list[int]:
    """Ends its process at the first sight of poison."""
    if any("poison" in text for text in texts):
        os.kill(os.getpid(), signal.SIGKILL)
    return lengths(texts)


def dies_once(model: str) -> Callable[[list[str]], list[int]]:
    """The first process to come to the 20th batch is killed there."""
    batches = 0

    def run(texts: list[str]) -> list[int]:
        nonlocal batches
        batches += 1
        if batches == 20:
            try:
                (Path(model) / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        return lengths(texts)

    return run


def freezes_once(model: str) -> Callable[[list[str]], list[int]]:
    """The first process to come to a batch stands still there, as one that nobody can reach."""

    def run(texts: list[str]) -> list[int]:
        try:
            (Path(model) / "froze").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        return lengths(texts)

    return run


def frozen(model: str) -> Callable[[list[str]], list[int]]:
    """Stands still while it loads, once its worker has been heard of."""
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise OSError(model)


def dawdles(texts: list[str]) -> list[int]:
    """Takes eight seconds for a batch, as a large model does."""
    time.sleep(8)
    return lengths(texts)


class OddError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def odd(texts: list[str]) -> list[Any]:
    """Fails in ways that do not travel well."""
    answers: dict[str, Any] = {"exception": OddError("ab"), "result": lambda: 0}
    return [answers.get(text, len(text)) for text in texts]


def moody(model: str) -> Callable[[list[str]], list[Any]]:
    """Refuses what is bad, until there is a file `fine` in the folder `model`."""
    refused = RecordError("not today")
    fine = Path(model) / "fine"
    return lambda texts: [len(text) if "bad" not in text or fine.exists() else refused for text in texts]


def broken(model: str) -> Callable[[list[str]], list[int]]:
    """Cannot be loaded."""
    raise OSError(f"no weights in {model}")


@reusable
def shared() -> DynamicBatcher[str, tuple[int, int]]:
    """One batcher in each process that asks: length, and how many were in the batch."""
    with Path(os.environ["HEADRACE_TEST_LOADS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")

    def run(texts: list[str]) -> list[tuple[int, int]]:
        time.sleep(0.05)
        return [(len(text), len(texts)) for text in texts]

    return DynamicBatcher(run, max_batch_size=64)


models = ReusablePool(max_models=1)
here: list[str] = []
"""Models of the pool in memory."""


def _measured(name: str) -> Iterator[DynamicBatcher[str, tuple[str, int, int]]]:
    here.append(name)
    yield DynamicBatcher(lambda texts: [(name, len(text), len(here)) for text in texts])
    here.remove(name)


@models.reusable(max_wait_s=0.02)
def first() -> Iterator[DynamicBatcher[str, tuple[str, int, int]]]:
    """For each text: which model measured it, its length, and how many models were in memory."""
    yield from _measured("first")


@models.reusable(max_wait_s=0.02)
def second() -> Iterator[DynamicBatcher[str, tuple[str, int, int]]]:
    """The same, by another model."""
    yield from _measured("second")


class Prefixes(FakeEngine):
    """Says that it has found half of each text in its cache, and answers without sampling."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0

    @property
    def profile(self) -> EngineProfile:
        return EngineProfile(batching="batches", batch_cost=4096, batch_size=8, caches_prefixes=True)

    def prepare(self, inputs: Any) -> list[Any]:
        prepared: list[Any] = super().prepare(inputs)
        return [replace(found, greedy=True) for found in prepared]

    def forward(self, batch: list[str]) -> list[list[float]]:
        self._tokens += sum(len(text.split()) for text in batch)
        return super().forward(batch)

    def count_cached(self, payload: Any) -> Any:
        """Nothing of one answer."""
        return payload

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of words."""
        return PrefixCacheStats(self._tokens, self._tokens // 2, self._tokens - self._tokens // 2)


class Halves(FakeEngine):
    """Computes in 8 bits at four times the speed. Its scores say in which type: 1 in float32, else `rounded`."""

    counts_tokens = tunable = True

    def __init__(self, model: str | None, dtype: str = "auto", quantize: str = "none", rounded: float = 1.001) -> None:
        super().__init__(model)
        self._dtype = "int8" if quantize == "int8" else "float32" if dtype == "auto" else dtype
        self._rounded = rounded

    def describe(self) -> Mapping[str, object]:
        return {"model_digest": "halves", "dtype": self._dtype}

    def hardware(self) -> Mapping[str, object]:
        return {"device": "cpu"}

    def dtype_speeds(self) -> Mapping[str, float]:
        return {}

    def forward_meter(self) -> None:
        pass

    def forward(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.0004 * len(batch) * (1 if self._dtype == "int8" else 4))
        return [self._rounded if self._dtype == "int8" else 1.0 for _ in batch]
