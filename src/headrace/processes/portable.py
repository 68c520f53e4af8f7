"""Pickling of results and exceptions for another process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import errors
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
        """The portable form of an exception."""
        try:
            pickled = pickle.dumps(error)
            if type(pickle.loads(pickled)) is not type(error):
                pickled = b""
        except BaseException:  # noqa: BLE001 - pickling a user's class may raise anything; the error must still arrive
            pickled = b""
        return cls(pickled, type(error).__name__, text_of(error), isinstance(error, HeadraceError))

    def unpacked(self) -> Exception:
        """The exception, or one with the same name and message."""
        if self.pickled:
            try:
                error = pickle.loads(self.pickled)
            except BaseException:  # noqa: BLE001 - the class is missing or cannot be created here
                error = None
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
    try:
        packed = pickle.dumps(sent, protocol=5)
        pickle.loads(packed)
    except BaseException:  # noqa: BLE001 - pickling a user's class may raise anything
        packed = pickle.dumps([_movable(result, refusal) for result in sent], protocol=5)
    return packed


def pack_request(request: object, what: str = "the record") -> bytes:
    """A request as bytes; `what` names it in the message.

    Raises:
        UnsendableError: something in it cannot be pickled.
    """
    try:
        return pickle.dumps(request, protocol=5)
    except BaseException as error:  # pickling a user's class may raise anything
        raise UnsendableError(f"{what} cannot be sent to another process: {text_of(error)}") from error


def unpack(packed: bytes) -> list[object]:
    """The results passed to `pack` in the other process."""
    return [item.unpacked() if isinstance(item, Portable) else item for item in pickle.loads(packed)]


def _movable(result: object, refusal: type[Exception]) -> object:
    try:
        pickle.loads(pickle.dumps(result, protocol=5))
    except BaseException as error:  # noqa: BLE001 - as above
        return Portable.of(
            refusal(f"a result of type {type(result).__name__} cannot leave its process: {text_of(error)}")
        )
    return result
