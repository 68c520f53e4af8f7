"""Calls of an engine's `prepare`, within a time limit: each input gets its prepared form or its error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeGuard

from headrace.batching.callables import unfinished
from headrace.batching.pending import own_copy
from headrace.batching.policy.cost import MOST_COST, checked_cost
from headrace.batching.results import checked_results
from headrace.columns import PayloadList, PreparedColumn
from headrace.engines.base import Engine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import BadResultError, BrokenOffError, EngineDeadError, ProcessTimeoutError, attempted
from headrace.extras import lazy
from headrace.jobs.pipeline.memory_budget import value_bytes
from headrace.jobs.pipeline.suspects import MOST_IN_A_ROW

if TYPE_CHECKING:
    import numpy
else:
    numpy = lazy("numpy")

_ROWS = 64
"""Records prepared per time limit if the engine has no batch size."""


class InTime:
    """`prepare_all` with a time limit for each batch of records.

    A batch that takes longer is split in halves until the record that blocks `prepare` fails alone. Each call has its
    own thread: one that hangs cannot be ended, and its result is ignored.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._in_a_row = 0

    @property
    def limits(self) -> bool:
        return self._timeout_s is not None

    def prepare(self, engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The prepared form of each input, or its error.

        Raises:
            BrokenOffError: the engine died, or hangs on every record.
        """
        if self._timeout_s is None:
            return prepare_all(engine, inputs)
        rows = profile_of(engine).batch_size or _ROWS
        pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        return [answer for piece in pieces for answer in self._within(engine, piece, self._timeout_s)]

    def _within(self, engine: Engine, inputs: Sequence[object], timeout_s: float) -> list[Prepared[object] | Exception]:
        future: Future[list[Prepared[object] | Exception]] = Future()
        threading.Thread(target=_answer, args=(future, engine, inputs), name="headrace-prepare", daemon=True).start()
        try:
            found = future.result(timeout_s)
        except TimeoutError:
            if future.done():  # raised by the engine, not by the wait
                raise
        else:
            self._in_a_row = 0
            return found
        if half := len(inputs) // 2:
            return self._within(engine, inputs[:half], timeout_s) + self._within(engine, inputs[half:], timeout_s)
        self._in_a_row += 1
        limit = f"{timeout_s:g} s (``engine_timeout_s``)"
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"the engine's prepare had no result after {limit} for {self._in_a_row} records in a row: the engine "
                "hangs; finished records are kept; run again to continue"
            )
        return [ProcessTimeoutError(f"the engine's prepare had no result after {limit}")]


def listed(answers: Sequence[Prepared[object] | Exception], inputs: Sequence[object]) -> PreparedColumn:
    """What an engine's `prepare` gave for these inputs, as a column."""
    errors = {row: answer for row, answer in enumerate(answers) if isinstance(answer, Exception)}
    good = [answer for answer in answers if isinstance(answer, Prepared)]
    payloads = [answer.payload if isinstance(answer, Prepared) else None for answer in answers]
    costs = [answer.cost if isinstance(answer, Prepared) else 0 for answer in answers]
    same = all(payload is value for payload, value in zip(payloads, inputs, strict=True))
    return PreparedColumn(
        PayloadList(payloads, 0 if same else value_bytes(payloads)),
        numpy.array(costs),
        errors,
        sum(answer.truncated for answer in good),
    )


def _answer(future: Future[list[Prepared[object] | Exception]], engine: Engine, inputs: Sequence[object]) -> None:
    found = attempted(prepare_all, engine, inputs)
    if isinstance(found, BaseException):
        future.set_exception(found)  # raised again in the waiting thread
    else:
        future.set_result(found)


def prepare_all(engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    """The prepared form of each input, or its error.

    If the call fails, each input is prepared alone. If it returns something other than one entry per input, all fail.

    Raises:
        BrokenOffError: the engine died, which is not a record failure.
    """
    found = attempted(_prepared, engine, inputs)
    if not isinstance(found, BaseException):
        return found
    if isinstance(found, EngineDeadError):
        raise BrokenOffError(
            f"the engine cannot continue: {found}; finished records are kept; run again to continue"
        ) from found
    if len(inputs) == 1 or isinstance(found, BadResultError):
        return [own_copy(found) for _ in inputs]
    return [prepare_all(engine, [value])[0] for value in inputs]


def _prepared(engine: Engine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    answers: object = engine.prepare(list(inputs))  # it may change the list
    if type(answers) is not list or len(answers) != len(inputs):
        answers = checked_results(answers, len(inputs), "prepare")
    return [answer if _is_sound(answer) else _checked(answer) for answer in answers]


def _is_sound(answer: object) -> TypeGuard[Prepared[object]]:
    """Whether it is what nearly all answers are: prepared, with a whole number as cost."""
    return type(answer) is Prepared and type(answer.cost) is int and 0 <= answer.cost <= MOST_COST


def _checked(answer: object) -> Prepared[object] | Exception:
    if isinstance(answer, BaseException):
        return answer if isinstance(answer, Exception) else own_copy(answer)
    if not isinstance(answer, Prepared):
        return unfinished("the engine's prepare", answer) or BadResultError(
            f"the engine's prepare returned {type(answer).__name__} for a record; "
            "it must return Prepared or an exception"
        )
    error = attempted(checked_cost, answer.cost, type(answer.payload))  # comparing a cost of the engine's own type
    return own_copy(error) if isinstance(error, BaseException) else answer
