"""A record on its way through a job, what became of it, and which values are no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.errors import RecordError

JsonObject: TypeAlias = dict[str, object]
"""A JSON object, as `json.loads` returns it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the input."""

    position: int
    """0-based place in the whole input; unique, and the same at every read of the same input."""
    id: Any
    """The value of the id column; the position where there is none."""
    data: Any
    """The row as the source read it (a dict for JSONL)."""


@dataclass(frozen=True, slots=True)
class Ok:
    """A record that was processed."""

    record: Record
    """`data` is what goes to the output beside the id: a dict of the columns kept, or None."""
    output: Any
    cost: int = 0
    """Of the record in the engine's own unit: tokens for text."""
    row: Any = None
    """The row as the source read it, for the dead letter of a record that fails after the engine."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A record that was not, and why."""

    record: Record
    """`data` is what could be read of it: the raw line where it is not JSON."""
    reason: str
    """A short stable word for grouping: the error's class name in most cases, such as `RecordError`."""
    message: str
    """One line for a person."""
    attempts: int = 1
    code: str | None = None
    """Where the record itself is at fault: what is wrong with it, as OpenAI's errors say it."""
    param: str | None = None
    """The field of a request body that it is about."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Names that an input holds and that are not read, all for one reason."""

    reason: str
    """Such as "a folder"."""
    count: int
    names: tuple[str, ...]
    """The first of them, relative to the input."""

    def more(self, other: LeftOut) -> LeftOut:
        """These and others of the same reason."""
        return LeftOut(self.reason, self.count + other.count, self.names)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names):,} more" if self.count > len(self.names) else ""
        return f"{self.reason}: {', '.join(self.names)}{more}"


Outcome: TypeAlias = Ok | Failed


def text_refusal(value: Any, name: str = "the input") -> RecordError | None:
    """Why a value cannot be taken as text; None where it can.

    Args:
        value: any.
        name: what the message calls it.
    """
    if not isinstance(value, str):
        return RecordError(f"{name} is {kind_of(value)}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer or file takes it
            return RecordError(f"{name} is not valid Unicode: {error.reason} at character {error.start}")
    return None


def kind_of(value: Any) -> str:
    """The type of a value, for a message: "null", or "of type int"."""
    return "null" if value is None else f"of type {type(value).__name__}"
