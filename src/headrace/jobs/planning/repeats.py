"""What the prompts of a job repeat, and the order of a template's fields that lets most be read from a cache. Pure."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.jobs.pipeline.prefixes import LEAST_GAIN, prefix_order, sharing

_TRIED_FIELDS = 5
"""With more fields, not all orders are tried."""
_TRIED_PROMPTS = 1024
"""Prompts for which all orders are tried."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """What a sample of prompts repeats, as fractions of their text."""

    prompts: int
    duplicates: float
    """In prompts that are equal to an earlier one."""
    beginnings: float
    """In the common beginnings of other prompts, in the order that puts these together."""
    as_read: float
    """In the common beginnings of neighbours, in the order of the input."""
    columns: Mapping[str, float]
    """For each column of the template, the fraction of its text in values that came before."""
    template: str | None = None
    """A template with the fields in a better order; None if the present one is as good."""
    better: float = 0.0
    """What the prompts repeat with that template: duplicates and beginnings together."""

    @property
    def repeated(self) -> float:
        return self.duplicates + self.beginnings

    @property
    def gains(self) -> bool:
        """Whether another order than the input's is worth it."""
        return self.beginnings - self.as_read >= LEAST_GAIN


def repeats(prompts: Sequence[str]) -> Repeats:
    total = sum(map(len, prompts)) or 1
    unique = list(dict.fromkeys(prompts))
    kept = sum(map(len, unique))
    shared = sharing(unique, prefix_order(unique))
    duplicates = 1 - kept / total if prompts else 0.0
    return Repeats(len(prompts), duplicates, shared.sorted * kept / total, shared.as_read * kept / total, {})


def template_repeats(template: str, rows: Sequence[Mapping[str, str]]) -> Repeats:
    """What the prompts of a template repeat, and a better order of its fields.

    Args:
        template: with at least one field.
    """
    fields = _TemplateFields(template)
    now = repeats([fields.filled(fields.order, row) for row in rows])
    columns = {name: _repeated([row[name] for row in rows]) for name in fields.names}
    best, better = fields.order, now.repeated
    some = rows[:_TRIED_PROMPTS]
    if len(fields.order) > 1:
        tried = {
            order: repeats([fields.filled(order, row) for row in some]).repeated for order in fields.orders(columns)
        }
        best = max(tried, key=tried.__getitem__)
        better = repeats([fields.filled(best, row) for row in rows]).repeated
    found = fields.template(best) if better - now.repeated >= LEAST_GAIN else None
    return replace(now, columns=columns, template=found, better=better if found else now.repeated)


def _repeated(values: Sequence[str]) -> float:
    total = sum(map(len, values))
    return 1 - sum(map(len, set(values))) / total if total else 0.0


class _TemplateFields:
    """The fields of a template that may change places, alone or with all fields of their line.

    The label before a field goes with it, line breaks stay.
    """

    def __init__(self, template: str) -> None:
        parts = [(literal, name) for literal, name, _, _ in string.Formatter().parse(template)]
        self._tail = "".join(literal for literal, name in parts if name is None)
        fields = [(literal, name) for literal, name in parts if name is not None]
        by_lines = any("\n" in literal for literal, _ in fields[1:])
        self._units: list[list[tuple[str, str]]] = []
        """Fields that stay together, each with the label before it."""
        self._breaks: list[str] = []
        for literal, name in fields:
            head, found, label = literal.rpartition("\n")
            if by_lines and self._units and not found:
                self._units[-1].append((label, name))
                continue
            spaces = "" if found else literal[: len(literal) - len(literal.lstrip(" "))]
            self._breaks.append(head + found + spaces)
            self._units.append([(label[len(spaces) :], name)])
        self.order = tuple(range(len(self._units)))
        self.names = list(dict.fromkeys(name for _, name in fields))

    def orders(self, columns: Mapping[str, float]) -> list[tuple[int, ...]]:
        """The orders to try: all, or of many fields the present one and the most repeated first."""
        if len(self.order) <= _TRIED_FIELDS:
            return list(itertools.permutations(self.order))
        by_repeats = sorted(self.order, key=lambda number: -min(columns[name] for _, name in self._units[number]))
        return [self.order, tuple(by_repeats)]

    def filled(self, order: Sequence[int], row: Mapping[str, str]) -> str:
        return "".join(gap + label + row[name] for gap, label, name in self._pieces(order)) + self._tail

    def template(self, order: Sequence[int]) -> str:
        """The template with its fields in this order."""
        pieces = (f"{_escaped(gap)}{_escaped(label)}{{{name}}}" for gap, label, name in self._pieces(order))
        return "".join(pieces) + _escaped(self._tail)

    def _pieces(self, order: Sequence[int]) -> Iterator[tuple[str, str, str]]:
        """The text before the label of each field, the label, and the field."""
        for gap, number in zip(self._breaks, order, strict=True):
            for place, (label, name) in enumerate(self._units[number]):
                yield "" if place else gap, label, name


def _escaped(literal: str) -> str:
    return literal.replace("{", "{{").replace("}", "}}")
