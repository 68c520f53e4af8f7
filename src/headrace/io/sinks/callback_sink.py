"""Passes results to a Python function instead of a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headrace.batching.callables import is_async, plain_function
from headrace.errors import JobError, text_of
from headrace.io.base import Take
from headrace.io.formats.dead_letters import encode_failures
from headrace.records import Failed, Ok

Receiver = Callable[[list[dict[str, Any]]], Any]


class CallbackWriter:
    """Calls a function with the rows of each part: every record once, finished or failed, in input order.

    A finished record is {id, the kept columns, `column`: its output}, with the engine's output object; a failed one is
    {id, error: {reason, message}}. All calls come from one thread, which is not the caller's. Awaitables are awaited
    there, on one event loop for all calls. Delivered rows are not recorded: a run that ends early cannot be resumed.

    Raises:
        ConfigError: `receive` is a generator function.
        JobError: from the methods, if the function raises.
    """

    suffix = ".handed"
    nulled = 0

    def __init__(self, receive: Receiver, column: str) -> None:
        if not is_async(receive):
            plain_function("sink", receive)
        self._receive = receive
        self._runner: asyncio.Runner | None = None
        self._column = column

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """Pass on finished records; writes nothing."""
        rows = []
        for ok in outcomes:
            kept: Mapping[str, object] = ok.record.data or {}
            rows.append({"id": ok.record.id, **kept, self._column: ok.output})
        self._hand_over(rows)
        return b""

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Pass on failed records; their lines are counted."""
        self._hand_over(
            [{"id": row.record.id, "error": {"reason": row.reason, "message": row.message}} for row in failures]
        )
        return encode_failures(failures)

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """Nothing to merge."""

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Nothing to interleave."""

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:  # noqa: ARG002
        """Nothing to rearrange."""
        return (b"" for take in takes for _ in take.orders)

    def _hand_over(self, rows: list[dict[str, object]]) -> None:
        if not rows:
            return
        try:
            answer = self._receive(rows)
            if isinstance(answer, (Generator, AsyncGenerator)):
                raise TypeError(f"it returned a {type(answer).__name__}, which nobody iterates")
            if isinstance(answer, Awaitable):
                self._runner = self._runner or asyncio.Runner()
                self._runner.run(_result_of(answer))
        except BaseException as error:
            # User code may raise anything; it ends the job.
            first, last = rows[0]["id"], rows[-1]["id"]
            raise JobError(
                f"the function that takes the results raised {type(error).__name__}: {text_of(error)} (at rows "
                f"{first!r:.60} to {last!r:.60}; such a job cannot be resumed: write to a file to keep what is done)"
            ) from error

    def close(self) -> None:
        """End the event loop of an asynchronous function."""
        if self._runner is not None:
            self._runner.close()


async def _result_of(answer: Awaitable[object]) -> object:
    return await answer
