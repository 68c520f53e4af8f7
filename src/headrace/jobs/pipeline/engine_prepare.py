"""Call an engine's `prepare`: one answer or error per input, whatever it raises or returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from headrace.batching.callables import unfinished
from headrace.batching.pending import checked_results, own_copy
from headrace.batching.policy.cost import checked_cost
from headrace.engines.base import AnyEngine, Prepared
from headrace.engines.profile import profile_of
from headrace.errors import BadResultError, BrokenOffError, EngineDeadError, ProcessTimeoutError, StoppedEarly
from headrace.jobs.pipeline.suspects import MOST_IN_A_ROW

_ROWS = 64
"""Records prepared per time limit if the engine has no batch size."""


class InTime:
    """`prepare_all` with a time limit for each batch of records.

    A batch that takes longer is split in halves until the record that blocks `prepare` fails alone. Each call has its
    own thread: one that hangs cannot be ended, and its result is ignored.

    Args:
        timeout_s: None for no limit.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._in_a_row = 0

    def prepare(self, engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The prepared form of each input, or its error.

        Raises:
            BrokenOffError: the engine died, or hangs on every record.
        """
        if self._timeout_s is None:
            return prepare_all(engine, inputs)
        profile = profile_of(engine)
        rows = profile.batch_size if profile.batching == "batches" else _ROWS
        pieces = [inputs[start : start + rows] for start in range(0, len(inputs), rows)]
        return [answer for piece in pieces for answer in self._within(engine, piece, self._timeout_s)]

    def _within(
        self, engine: AnyEngine, inputs: Sequence[object], timeout_s: float
    ) -> list[Prepared[object] | Exception]:
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
        limit = f"{timeout_s:g} s (--engine-timeout)"
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"the engine's prepare had no result after {limit} for {self._in_a_row} records in a row: the engine "
                "hangs; finished records are kept; run again to continue"
            )
        return [ProcessTimeoutError(f"the engine's prepare had no result after {limit}")]


def _answer(future: Future[list[Prepared[object] | Exception]], engine: AnyEngine, inputs: Sequence[object]) -> None:
    try:
        future.set_result(prepare_all(engine, inputs))
    except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
        future.set_exception(error)


def prepare_all(engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    """The prepared form of each input, or its error.

    If the call fails or returns something other than one entry per input, each input is prepared alone.

    Raises:
        BrokenOffError: the engine died, which is not a record failure.
    """
    try:
        return _prepared(engine, inputs)
    except EngineDeadError as error:
        raise BrokenOffError(
            f"the engine cannot continue: {error}; finished records are kept; run again to continue"
        ) from error
    except StoppedEarly:
        raise
    except BaseException as error:  # noqa: BLE001 - an engine may raise anything
        if len(inputs) == 1:
            return [own_copy(error)]
    return [prepare_all(engine, [value])[0] for value in inputs]


def _prepared(engine: AnyEngine, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
    return [_checked(answer) for answer in checked_results(engine.prepare(inputs), len(inputs), "prepare")]


def _checked(answer: object) -> Prepared[object] | Exception:
    if isinstance(answer, BaseException):
        return answer if isinstance(answer, Exception) else own_copy(answer)
    if not isinstance(answer, Prepared):
        return unfinished("the engine's prepare", answer) or BadResultError(
            f"the engine's prepare returned {type(answer).__name__} for a record; "
            "it must return Prepared or an exception"
        )
    try:
        checked_cost(answer.cost, answer.payload)
    except Exception as error:  # noqa: BLE001 - comparing an engine's own cost type may raise anything
        return own_copy(error)
    return answer
