"""An engine's own `prepare`, whatever it raises or returns: one answer for each input, and each failure its input's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.batching.callables import unfinished
from headrace.batching.pending import checked_results, own_copy
from headrace.batching.policy.cost import checked_cost
from headrace.engines.base import Engine, Prepared
from headrace.errors import BadResultError, BrokenOffError, EngineDeadError, StoppedEarly


def prepare_all(engine: Engine[Any, Any], inputs: Sequence[Any]) -> list[Prepared[Any] | Exception]:
    """What the engine makes of each input, or that input's error.

    If the call fails or returns something other than one entry per input, each input is prepared alone.

    Raises:
        BrokenOffError: the engine is gone, which is no record's fault.
    """
    try:
        return _prepared(engine, inputs)
    except EngineDeadError as error:
        raise BrokenOffError(
            f"the engine cannot go on: {error}; what is finished is kept, run again to continue"
        ) from error
    except StoppedEarly:
        raise
    except BaseException as error:  # noqa: BLE001 - an engine may raise anything
        if len(inputs) == 1:
            return [own_copy(error)]
    return [prepare_all(engine, [value])[0] for value in inputs]


def _prepared(engine: Engine[Any, Any], inputs: Sequence[Any]) -> list[Prepared[Any] | Exception]:
    return [_checked(answer) for answer in checked_results(engine.prepare(inputs), len(inputs), "prepare")]


def _checked(answer: Any) -> Prepared[Any] | Exception:
    if isinstance(answer, BaseException):
        return answer if isinstance(answer, Exception) else own_copy(answer)
    if not isinstance(answer, Prepared):
        return unfinished("the engine's prepare", answer) or BadResultError(
            f"the engine's prepare returned {type(answer).__name__} for a record; "
            "it must return Prepared or an exception"
        )
    try:
        checked_cost(answer.cost, answer.payload)
    except Exception as error:  # noqa: BLE001 - also what comparing a strange cost raises
        return own_copy(error)
    return answer
