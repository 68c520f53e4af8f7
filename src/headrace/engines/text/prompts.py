"""Prompts of embedding models: text before each input, such as "query: "."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.engines.base import PromptedText
from headrace.errors import ConfigError, RecordError
from headrace.wording import shown


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a model."""

    default: str = ""
    """Before each text that names no other."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Those that a text may choose."""

    def before(self, value: str | PromptedText) -> str:
        if isinstance(value, PromptedText):
            return self.named[value.prompt_name] + value.text
        return self.default + value

    def refusal(self, value: PromptedText) -> RecordError | None:
        """The error for an unknown prompt; None if it is known."""
        return None if value.prompt_name in self.named else RecordError(unknown_prompt(value.prompt_name, self.named))


def chosen_prompt(
    named: Mapping[str, str], default_name: str | None, prompt_name: str | None, prompt: str | None
) -> str:
    """The default prompt: the user's own or, by name, one of the model's.

    Raises:
        ConfigError: both are given, or the model has no prompt of that name.
    """
    if prompt is not None:
        if prompt_name is not None:
            raise ConfigError(
                f"``prompt_name`` is {prompt_name!r} and ``prompt`` is {shown(prompt)}; give only one of them"
            )
        return prompt
    if prompt_name is None:
        return named.get(default_name or "") or ""
    if prompt_name not in named:
        raise ConfigError(
            f"{unknown_prompt(prompt_name, named)} (in config_sentence_transformers.json); ``prompt`` sets its text"
        )
    return named[prompt_name]


def unknown_prompt(name: str, known: Mapping[str, str]) -> str:
    return f"prompt_name is {shown(name)}; the model's prompts are {', '.join(map(repr, known)) or 'none'}"
