"""Prompt templates such as "Q: {question}", and prompts that still know the template they were made from."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Self

from headrace.errors import ConfigError, RecordError
from headrace.records import Unreadable, text_refusal, value_at


def template_fields(template: str) -> tuple[str, ...]:
    """The names in braces, in their order.

    Raises:
        ConfigError: the template is invalid, or names none.
    """
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for name, spec, conversion in fields:
        if name == "" or spec or conversion:
            raise ConfigError(f"prompt template {template!r}: write column names alone in braces, as in {{question}}")
    names = tuple(name for name, _, _ in fields if name is not None)
    if not names:
        raise ConfigError(f"prompt template {template!r} names no column: every text would be the same")
    return names


def filled(template: str, fields: Mapping[str, str]) -> str:
    """The text of a template with these fields."""
    return "".join(
        literal if name is None else literal + fields[name]
        for literal, name, _, _ in string.Formatter().parse(template)
    )


def field_text(row: Mapping[str, object], name: str) -> str:
    """The text of a field: the value of a column of the row, or the value in a mapping that `column.key` names.

    Raises:
        RecordError: it is missing, null, not valid Unicode, or a list or dict that JSON cannot hold.
    """
    value = value_at(row, name)
    if type(value) is Unreadable:
        raise value.refusal(name)
    if isinstance(value, (int, float, list, dict)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"column {name!r} cannot be written into a text: {error}") from None
    if refusal := text_refusal(value, f"column {name!r}"):
        raise refusal
    return str(value)


class FilledTemplate(str):
    """The text of a template, which still knows the template and its fields."""

    __slots__ = ("fields", "template")

    template: str
    fields: Mapping[str, str]

    def __new__(cls, template: str, fields: Mapping[str, str]) -> Self:
        """Fill the template."""
        text = super().__new__(cls, filled(template, fields))
        text.template, text.fields = template, fields
        return text

    def __getnewargs__(self) -> tuple[str, Mapping[str, str]]:  # type: ignore[override]  # of a text: the text
        """What makes a copy of it."""
        return self.template, self.fields
