"""Results and exceptions on their way to another process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import errors
from headrace.errors import HeadraceError, ProcessError, RecordError, text_of


class UnsendableError(RecordError):
    """What is to go to another process cannot be pickled."""


@dataclass(frozen=True, slots=True)
class Portable:
    """An exception on its way to another process, which may not have its class."""

    pickled: bytes
    kind: str
    text: str
    own: bool = field(default=False)
    """Whether it is one of Headrace's: then its nearest known class will do."""

    @classmethod
    def of(cls, error: BaseException) -> Portable:
        """What can be sent of an exception."""
        try:
            pickled = pickle.dumps(error)
            if type(pickle.loads(pickled)) is not type(error):
                pickled = b""
        except BaseException:  # noqa: BLE001 - whatever a user's class does when it is pickled: the error must still arrive
            pickled = b""
        return cls(pickled, type(error).__name__, text_of(error), isinstance(error, HeadraceError))

    def unpacked(self) -> Exception:
        """The exception, or one with its name and words."""
        if self.pickled:
            try:
                error = pickle.loads(self.pickled)
            except BaseException:  # noqa: BLE001 - the class is not here, or cannot be made here
                error = None
            if isinstance(error, Exception):
                return error
        if self.own and isinstance(known := getattr(errors, self.kind, None), type):
            named: Exception = known(self.text)
            return named
        alike: type[Exception] = type(self.kind, (ProcessError,), {})  # a job groups failures by this name
        return alike(self.text)


def pack(results: Sequence[Any]) -> bytes:
    """Results as bytes; exceptions travel as `Portable`, and a result that cannot travel is its record's error."""
    sent = [Portable.of(result) if isinstance(result, BaseException) else result for result in results]
    try:
        packed = pickle.dumps(sent, protocol=5)
        pickle.loads(packed)
    except BaseException:  # noqa: BLE001 - whatever a user's class does when it is pickled
        packed = pickle.dumps([_movable(result) for result in sent], protocol=5)
    return packed


def pack_request(request: Any) -> bytes:
    """A request as bytes.

    Raises:
        UnsendableError: something in it cannot be pickled.
    """
    try:
        return pickle.dumps(request, protocol=5)
    except BaseException as error:  # whatever a user's class does when it is pickled
        raise UnsendableError(f"the record cannot be sent to another process: {text_of(error)}") from error


def unpack(packed: bytes) -> list[Any]:
    """What `pack` was given, on the other side."""
    return [item.unpacked() if isinstance(item, Portable) else item for item in pickle.loads(packed)]


def _movable(result: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(result, protocol=5))
    except BaseException as error:  # noqa: BLE001 - as above
        return Portable.of(
            RecordError(f"a result of type {type(result).__name__} cannot leave its process: {text_of(error)}")
        )
    return result
