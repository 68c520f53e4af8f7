"""Declare a figure as a field of a frozen dataclass: whatever shows, keeps or explains figures reads the declaration.

    truncated: int = figure(
        0, "records cut to the model's maximum length", of=lambda run: run.stages["prepare"]["truncated"], adds="sum",
        label="truncated", text=lambda found: f"{found.truncated:,} records cut to the model's maximum length",
    )

From this line alone, the terminal, notebooks and the tables of docs/report.md have the figure; with `kept=True`,
`report.json` too. What a page or `headrace report --json` shows is a field of `JobFigures`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from headrace.wording import spelled

T = TypeVar("T")
_MARKED = re.compile(r"``.+?``")

Unit: TypeAlias = Literal["", "records", "tokens", "batches", "chunks", "seconds", "fraction", "bytes", "per second"]
Adds: TypeAlias = Literal["sum", "highest", "last"]
"""How the values of several runs of a job become one: they are added up, also by name; or the highest or last counts.
The events of all workers of a run are folded into one table, so that nothing is added up over workers."""
Line: TypeAlias = tuple[str, str]
"""A label, and the text beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a figure's declaration says beside its type and default."""

    name: str = ""
    """The name of the field, which is also the key in JSON."""
    meaning: str
    """For the docs: a phrase without a full stop."""
    unit: Unit = ""
    of: Callable[[Any], object] | None = None
    """Its formula: its value, from what its table is made from. None for the attribute of that with the figure's name;
    where there is none, a later step fills the figure in."""
    adds: Adds = "last"
    kept: bool = False
    """Whether `report.json` has it, though those of earlier versions may not."""
    required: bool = False
    """Whether every `report.json` has it."""
    label: str = ""
    """What its line is called; empty for a figure without a line."""
    text: Callable[[Any], str] | None = None
    """Its line, from the whole table. It is left out if it is empty, or if the figure is and has no `always`."""
    always: bool = False
    lines: Callable[[Any], list[Line]] | None = None
    """In place of a text: its lines with their labels."""
    meanings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For the docs: what each of its lines means, by label."""
    what_to_do: str = ""
    """For the docs."""


def figure(default: Any, meaning: str, *, in_repr: bool = True, **more: Any) -> Any:
    """A field of a dataclass that is a figure.

    Args:
        default: its value where nothing was heard of it; a function without parameters makes one for each object.
        meaning: for the docs.
        in_repr: whether `repr` of the table has it.
        more: fields of `Figure`.
    """
    more["kept"] = more.get("kept", False) or more.get("required", False)
    metadata = {"figure": Figure(meaning=meaning, **more)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=in_repr)
    return dataclasses.field(default=default, metadata=metadata, repr=in_repr)


@functools.cache
def declared(table: type) -> tuple[Figure, ...]:
    """The figures that a dataclass declares, in order."""
    return tuple(
        dataclasses.replace(field.metadata["figure"], name=field.name)
        for field in dataclasses.fields(table)
        if "figure" in field.metadata
    )


def fill(table: type[T], source: object) -> T:
    """A table whose figures have the values of their formulas."""
    figures = declared(table)  # type: ignore[arg-type]  # a class is hashable
    given = {one.name: one.of(source) for one in figures if one.of is not None}
    return table(**{one.name: getattr(source, one.name) for one in figures if hasattr(source, one.name)} | given)


def lines_of(table: object, *names: str) -> Iterator[Line]:
    """The lines of a table's figures, or of the named ones, in order."""
    for one in declared(type(table)):  # type: ignore[arg-type]
        if (names and one.name not in names) or not (one.always or getattr(table, one.name)):
            continue
        if one.lines is not None:
            yield from one.lines(table)
        elif one.text is not None and (text := one.text(table)):
            yield one.label, text


def as_markdown(*tables: type) -> str:
    """One table of the docs: each line of the figures, what it means, and what to do about it."""
    rows = [
        (label, meaning, one.what_to_do)
        for table in tables
        for one in declared(table)
        for label, meaning in (one.meanings or {one.label: one.meaning}).items()
        if label
    ]
    if any(what for *_, what in rows):
        return markdown(("figure", "meaning", "what to do"), rows)
    return markdown(("line", "meaning"), [(f"`{label}`", meaning) for label, meaning, _ in rows])


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of the docs, which name settings by their flags."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return _MARKED.sub(lambda found: f"`{spelled(found[0], 'flags')}`", "\n".join(lines)).replace("|  |", "| |")
