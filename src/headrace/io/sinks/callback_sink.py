"""Passes results to a Python function instead of a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any

from headrace.batching.callables import is_async, plain_function
from headrace.errors import JobError, text_of
from headrace.io.formats.dead_letters import encode_failures
from headrace.io.formats.writer import NoFileWriter, row_of
from headrace.records import Failed, Ok
from headrace.wording import shown

Receiver = Callable[[list[dict[str, Any]]], Any]


class CallbackWriter(NoFileWriter):
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
        self._hand_over([row_of(ok, self._column) for ok in outcomes])
        return b""

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Pass on failed records; their lines are counted."""
        self._hand_over(
            [{"id": row.record.id, "error": {"reason": row.reason, "message": row.message}} for row in failures]
        )
        return encode_failures(failures)

    def _hand_over(self, rows: list[dict[str, object]]) -> None:
        if not rows:
            return
        try:
            answer = self._receive(rows)
            if isinstance(answer, (Generator, AsyncGenerator)):
                raise TypeError(f"it returned a {type(answer).__name__}, which would never run")
            if isinstance(answer, Awaitable):
                self._runner = self._runner or asyncio.Runner()
                self._runner.run(_result_of(answer))
        except BaseException as error:
            # User code may raise anything; it ends the job.
            first, last = rows[0]["id"], rows[-1]["id"]
            raise JobError(
                f"the function that takes the results raised {type(error).__name__}: {text_of(error)} (at rows "
                f"{shown(first)} to {shown(last)}; such a job cannot be resumed: write to a file to keep what is done)"
            ) from error

    def close(self) -> None:
        """End the event loop of an asynchronous function."""
        if self._runner is not None:
            self._runner.close()


async def _result_of(answer: Awaitable[object]) -> object:
    return await answer
