"""Flags that are the engine's: whatever `headrace run` does not know itself, by the engine's own names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError


def engine_options(arguments: Sequence[str], bare: str = "-i {}? Put a glob in quotes: -i '*.jsonl'") -> dict[str, Any]:
    """`--max-num-seqs 64 --enforce-eager --no-enable-prefix-caching` as options of an engine.

    A value that is JSON (a number, a list, an object) is read as that, any other is text.

    Args:
        arguments: what the command did not take itself.
        bare: what may have been meant by an argument without a flag.

    Raises:
        ConfigError: something that is no flag, or a flag given twice.
    """
    options: dict[str, Any] = {}
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(
                f"unexpected argument {flag!r}: flags begin with --, and a flag takes one value; did you mean "
                + bare.format(flag)
            )
        name, equals, text = flag.removeprefix("--").partition("=")
        value: Any
        if equals:
            value = _value(text)
        elif left and not left[0].startswith("--"):
            value = _value(left.pop(0))
        else:
            value = not name.startswith("no-")
            name = name.removeprefix("no-")
        name = name.replace("-", "_")
        if name in options:
            raise ConfigError(f"{flag} is given twice")
        options[name] = value
    return options


def as_typed(arguments: Sequence[str], option: str) -> str:
    """The flag by which `option` was given, such as `--no-eager` for `eager`; the option itself if there is none."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag[2:].removeprefix("no-").replace("-", "_") == option:
            return flag
    return option


def as_flag(option: str) -> str:
    """The flag of an engine's option."""
    return "--" + option.replace("_", "-")


def suggestion(typed: str, flags: Sequence[str]) -> str:
    """Which of the flags may have been meant, as the end of a sentence; nothing where none is like it."""
    close = difflib.get_close_matches(as_flag(typed.lstrip("-")), [*dict.fromkeys(flags)], 3, 0.75)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
