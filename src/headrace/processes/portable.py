"""Pickling of results and exceptions for another process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import errors
from headrace.batching.foreign_calls import Raised, attempt
from headrace.errors import HeadraceError, ProcessError, RecordError, text_of


class UnsendableError(RecordError):
    """A record cannot be pickled for another process."""


@dataclass(frozen=True, slots=True)
class Portable:
    """An exception in picklable form, for a process that may lack its class."""

    pickled: bytes
    kind: str
    text: str
    own: bool = field(default=False)
    """Whether it is a Headrace exception, which can be rebuilt from its class name."""

    @classmethod
    def of(cls, error: BaseException) -> Portable:
        there = attempt(_there_and_back, error)
        pickled = there[0] if not isinstance(there, Raised) and type(there[1]) is type(error) else b""
        return cls(pickled, type(error).__name__, text_of(error), isinstance(error, HeadraceError))

    def unpacked(self) -> Exception:
        """The exception, or one with the same name and message."""
        if self.pickled:
            error = attempt(pickle.loads, self.pickled)  # its class may be missing here
            if isinstance(error, Exception):
                return error
        if self.own and isinstance(known := getattr(errors, self.kind, None), type):
            named: Exception = known(self.text)
            return named
        alike: type[Exception] = type(self.kind, (ProcessError,), {})  # a job groups failures by this name
        return alike(self.text)


def pack(results: Sequence[object], refusal: type[Exception] = RecordError) -> bytes:
    """Results as bytes; exceptions become `Portable`, and an unpicklable result becomes a `refusal`."""
    sent = [Portable.of(result) if isinstance(result, BaseException) else result for result in results]
    there = attempt(_there_and_back, sent)
    if isinstance(there, Raised):
        return pickle.dumps([_movable(result, refusal) for result in sent], protocol=5)
    return there[0]


def pack_request(request: object, what: str = "the record") -> bytes:
    """A request as bytes; `what` names it in the message. Raises UnsendableError: something in it cannot be pickled."""
    packed = attempt(pickle.dumps, request, protocol=5)
    if isinstance(packed, Raised):
        raise UnsendableError(f"{what} cannot be sent to another process: {text_of(packed.cause)}") from packed.cause
    return packed


def unpack(packed: bytes) -> list[object]:
    """The results passed to `pack` in the other process."""
    return [item.unpacked() if isinstance(item, Portable) else item for item in pickle.loads(packed)]


def _movable(result: object, refusal: type[Exception]) -> object:
    there = attempt(_there_and_back, result)
    if isinstance(there, Raised):
        words = text_of(there.cause)
        return Portable.of(refusal(f"a result of type {type(result).__name__} cannot leave its process: {words}"))
    return result


def _there_and_back(value: object) -> tuple[bytes, object]:
    """The value as bytes, and made of them again. Both run methods of the user's classes."""
    packed = pickle.dumps(value, protocol=5)
    return packed, pickle.loads(packed)
