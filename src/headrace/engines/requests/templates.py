"""Prompt templates such as "Q: {question}", and prompts that still know the template they were made from."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from headrace.engines.requests.chat import ROLES
from headrace.errors import ConfigError, RecordError
from headrace.records import Json, Unreadable, text_refusal, value_at
from headrace.wording import shown


def template_text(given: object) -> str | None:
    """A prompt template as text: itself, or messages as JSON; a file `*.json` holds either as JSON.

    Raises:
        ConfigError: it is neither, or the file cannot be read.
    """
    if isinstance(given, str) and given.endswith(".json") and "{" not in given:
        try:
            given = json.loads(Path(given).read_text("utf-8")) or ""
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is not valid JSON ({error})"
            raise ConfigError(f"cannot read ``prompt_template`` {given}: {why or error}") from None
    if given is None or (isinstance(given, str) and chat_of(given) is None):
        return given
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, Sequence) and given and all(_is_message(one) for one in given):
        return json.dumps(list(given), ensure_ascii=False)
    raise ConfigError(
        f"``prompt_template`` is {shown(given)}: it must be a text, or a list of messages "
        f'{{"role": ..., "content": "text with {{column}}"}} with one of the roles {", ".join(ROLES)}'
    )


def _is_message(given: object) -> bool:
    return (
        isinstance(given, Mapping)
        and set(given) == {"role", "content"}
        and given["role"] in ROLES
        and isinstance(given["content"], str)
    )


@functools.lru_cache(maxsize=16)
def chat_of(template: str) -> tuple[Json, ...] | None:
    """The messages of a template that is a chat in JSON; None for a text."""
    try:
        found = json.loads(template) if template.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return tuple(found) if isinstance(found, list) else None


def template_fields(template: str) -> tuple[str, ...]:
    """The names in braces, in their order; of a chat, those of its messages.

    Raises:
        ConfigError: the template is invalid, or names none.
    """
    chat = chat_of(template)
    names = _fields(template) if chat is None else tuple(name for one in chat for name in _fields(one["content"]))
    if not names:
        raise ConfigError(f"prompt template {template!r} names no column: every text would be the same")
    return names


def prompt_of(template: str, fields: Mapping[str, str], *, splits: bool) -> str | list[Mapping[str, str]]:
    """The prompt of a template with these fields, or its chat.

    Args:
        template: a text, or a chat in JSON.
        fields: their texts.
        splits: whether each text must still know its template, as a prompt may be split.
    """
    make = FilledTemplate if splits else filled
    chat = chat_of(template)
    if chat is None:
        return make(template, fields)
    return [{"role": one["role"], "content": make(one["content"], fields)} for one in chat]


def _fields(template: str) -> tuple[str, ...]:
    """The names in braces; maybe none."""
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for name, spec, conversion in fields:
        if name == "" or spec or conversion:
            raise ConfigError(f"prompt template {template!r}: write column names alone in braces, as in {{question}}")
    return tuple(name for name, _, _ in fields if name is not None)


def filled(template: str, fields: Mapping[str, str]) -> str:
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
        text = super().__new__(cls, filled(template, fields))
        text.template, text.fields = template, fields
        return text

    def __getnewargs__(self) -> tuple[str, Mapping[str, str]]:  # type: ignore[override]  # of a text: the text
        return self.template, self.fields
