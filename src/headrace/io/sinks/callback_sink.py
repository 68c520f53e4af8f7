"""Passes results to a Python function, or keeps them in memory, instead of a file."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any

from headrace.batching.callables import is_async, plain_function
from headrace.columns import FinishedRows
from headrace.errors import ConfigError, JobError, attempted, text_of
from headrace.io.base import PartWriter
from headrace.io.formats.cells import exact_values
from headrace.io.formats.dead_letters import encode_failures
from headrace.io.formats.writer import row_of
from headrace.records import Failed, JsonObject, Ok
from headrace.wording import shown

Receiver = Callable[[list[dict[str, Any]]], Any]


def check_receiver(sink: object) -> None:
    """Check that a sink is a function that can take a list of rows.

    Raises:
        ConfigError: it is a class, a generator function, or takes other arguments.
    """
    if isinstance(sink, type):
        raise ConfigError(
            f"the sink is the class {sink.__name__}, and what it makes of the rows would be thrown away: "
            'sink="list" returns the rows; or pass a function that keeps them, such as rows.extend of a list'
        )
    if not callable(sink):
        raise ConfigError(
            f"the sink is of type {type(sink).__name__}; give the name of a file, folder or database, a function, or "
            "one of list, pandas, polars, arrow and numpy"
        )
    if not is_async(sink):
        plain_function("sink", sink)
    try:
        signature = inspect.signature(sink)
    except ValueError:  # some functions in C do not tell
        return
    try:
        signature.bind([])
    except TypeError as error:
        name = getattr(sink, "__qualname__", type(sink).__name__)
        raise ConfigError(
            f"the sink {name}{signature} cannot be called with a list of rows: {error}; pass a function of one "
            'argument, such as rows.extend of a list, or sink="list", which returns the rows'
        ) from None


class Rows:
    """Keeps the rows of a job, as a function would get them, and gives them in input order."""

    def __init__(self) -> None:
        self._kept: dict[int, JsonObject] = {}

    def keep(self, positions: Iterable[int], rows: Iterable[JsonObject]) -> None:
        """Keep rows with their positions in the input."""
        self._kept.update(zip(positions, rows, strict=True))

    def in_order(self) -> list[JsonObject]:
        return [self._kept[position] for position in sorted(self._kept)]


class CallbackWriter(PartWriter):
    """Calls a function with the rows of each part: every record once, finished or failed, in input order.

    A finished record is {id, the kept columns, `column`: its output}, with the engine's output object; a failed one is
    {id, error: {reason, message}}. All calls come from one thread, which is not the caller's. Awaitables are awaited
    there, on one event loop for all calls. Delivered rows are not recorded: a run that ends early cannot be resumed.

    `Rows` in the place of the function gets the same rows.

    Raises:
        ConfigError: see `check_receiver`.
        JobError: from the methods, if the function raises.
    """

    suffix = ".handed"
    nulled = 0

    def __init__(self, receive: Receiver | Rows, column: str) -> None:
        if not isinstance(receive, Rows):
            check_receiver(receive)
        self._receive = receive
        self._runner: asyncio.Runner | None = None
        self._column = column

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        self._hand_over(_positions(outcomes), [row_of(ok, self._column) for ok in outcomes])
        return b""

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes:
        rows: list[JsonObject] = []
        for piece in pieces:
            columns: dict[str, Iterable[object]] = {"id": exact_values(piece.ids)}
            columns |= {name: exact_values(column) for name, column in (piece.kept or {}).items()}
            columns[self._column] = piece.outputs
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        self._hand_over([position for piece in pieces for position in piece.positions.tolist()], rows)
        return b""

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        self._hand_over(
            _positions(failures),
            [row.as_row() for row in failures],
        )
        return encode_failures(failures)

    def _hand_over(self, positions: Sequence[int], rows: list[JsonObject]) -> None:
        if isinstance(self._receive, Rows):
            self._receive.keep(positions, rows)
            return
        if not rows:
            return
        error = attempted(self._call, self._receive, rows)
        if error is not None:
            first, last = rows[0]["id"], rows[-1]["id"]
            raise JobError(
                f"the function that takes the results raised {type(error).__name__}: {text_of(error)} (at rows "
                f"{shown(first)} to {shown(last)}; such a job cannot be resumed: write to a file to keep what is done)"
            ) from error

    def _call(self, receive: Receiver, rows: list[dict[str, object]]) -> None:
        answer = receive(rows)
        if isinstance(answer, (Generator, AsyncGenerator)):
            raise TypeError(f"it returned a {type(answer).__name__}, which would never run")
        if isinstance(answer, Awaitable):
            self._runner = self._runner or asyncio.Runner()
            self._runner.run(_result_of(answer))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


def _positions(outcomes: Sequence[Ok | Failed]) -> list[int]:
    return [outcome.record.position for outcome in outcomes]


async def _result_of(answer: Awaitable[object]) -> object:
    return await answer
