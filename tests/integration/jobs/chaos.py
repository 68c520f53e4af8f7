"""User code that does whatever its record says: it raises anything and returns anything.

A record says in its columns `map`, `engine` and `finish` what happens to it in each, by a name in `RAISED`, `RETURNED`
or, for the engine, `WHOLE`; null is the usual.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.batching.step_model import Done, StepFunction
from headrace.engines.base import Prepared
from headrace.errors import RecordError, StoppedError, TooManyErrorsError, TransientError


class WordlessError(Exception):
    """Cannot say what it is, cannot be copied, cannot be pickled."""

    def __str__(self) -> str:
        raise SystemExit(4)

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class UnportableError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


class LockedError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())


RAISED: Mapping[str, Callable[[], BaseException]] = {
    kind.__name__: kind
    for kind in (
        StopIteration,
        StopAsyncIteration,
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        asyncio.CancelledError,
        BaseException,
        RecursionError,
        MemoryError,
        OSError,
        TimeoutError,
        ConnectionError,
        WordlessError,
        LockedError,
        TransientError,
        StoppedError,
        RecordError,
        TooManyErrorsError,
    )
} | {
    "UnportableError": lambda: UnportableError("one", "other"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError(), OSError()]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit()]),
    "half a surrogate pair": lambda: ValueError("\ud800"),
    "a long story": lambda: ValueError("word " * 20_000),
}


class Mute:
    """An object that no one can write."""


def _endless() -> Any:
    while True:
        yield 1


async def _later() -> int:
    return 1


def _round() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


RETURNED: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a number": lambda: 42,
    "not a number": lambda: math.nan,
    "infinity": lambda: -math.inf,
    "a huge number": lambda: 10**400,
    "a huge text": lambda: "word " * 20_000,
    "half a surrogate pair": lambda: "\ud800",
    "bytes": lambda: b"\xff",
    "a set": lambda: {1, 2},
    "an object": Mute,
    "a class": lambda: Mute,
    "a function": lambda: lambda: None,
    "a generator": _endless,
    "a promise": _later,
    "a ring": _round,
    "a lock": threading.Lock,
    "an exception": lambda: ValueError("returned"),
    "an exit": lambda: SystemExit(0),
    "a dict of odd keys": lambda: {(1, 2): 3},
}

WHOLE: Mapping[str, Callable[[int], Any]] = {
    "nothing": lambda count: None,
    "one too few": lambda count: [1] * (count - 1),
    "one too many": lambda count: [1] * (count + 1),
    "a text": lambda count: "x" * count,
    "a dict": lambda count: dict.fromkeys(range(count)),
    "a generator": lambda count: _endless(),
    "a promise": lambda count: _later(),
}


def _do(kind: str | None, usual: Any) -> Any:
    if kind is None:
        return usual
    if kind in RAISED:
        raise RAISED[kind]()
    return RETURNED[kind.removeprefix("returns ")]()


def map_row(row: Mapping[str, Any]) -> Any:
    """For `--map`."""
    return _do(row["map"], {"id": row["id"], "text": row["engine"], "finish": row["finish"]})


def finish_row(row: Mapping[str, Any], output: Any) -> Any:
    """For `--finish`."""
    return _do(row["finish"], output)


def engine(batch: list[str | None]) -> Any:
    """For `--engine`."""
    for kind in batch:
        if kind is not None and kind.startswith("all: "):
            return WHOLE[kind.removeprefix("all: ")](len(batch))
    return [_do(kind, "fine") for kind in batch]


class _Parts:
    """What engines of every kind have."""

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "chaos"}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Any] | Exception]:
        return [Prepared(value, cost=1) for value in inputs]

    def close(self) -> None:
        pass


class Batches(_Parts):
    """A whole engine that runs batches."""

    pads = False
    default_batch_cost = default_batch_size = 8

    def forward(self, batch: list[Any]) -> Any:
        return engine(batch)


class Requests(_Parts):
    """One that batches by itself."""

    max_in_flight = 8

    async def infer(self, payload: Any) -> Any:
        await asyncio.sleep(0)
        return _do(payload, "fine")


class Steps(_Parts, StepFunction[Any, Any, Any]):
    """One that works in steps."""

    max_slots = 8
    max_cost = 1000

    def __init__(self) -> None:
        StepFunction.__init__(self, lambda states: [Done(_do(state, "fine")) for state in states])


class Preparing(Batches):
    """One that fails before the batch."""

    def prepare(self, inputs: Sequence[Any]) -> Any:
        for kind in inputs:
            if kind is not None and kind.startswith("all: "):
                return WHOLE[kind.removeprefix("all: ")](len(inputs))
        return [_do(value, Prepared(value, cost=1)) for value in inputs]

    def forward(self, batch: list[Any]) -> Any:
        return ["fine"] * len(batch)
