"""How messages are worded: settings are named as the user's door names them, and long values are shortened.

A message names a setting by its flag, such as `--id-column ""`. A Python program reads `id_column=""` instead, and the
author of a settings file `id_column: ""`.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Door: TypeAlias = Literal["python", "flags", "keys"]
"""How the user gives settings: keyword arguments, flags of a command, or keys of a file."""

KEYWORDS = {
    "allow-pickled-weights": "pickled_weights",
    "allowed-host": "allowed_hosts",
    "endpoint": "endpoints",
    "engine-timeout": "engine_timeout_s",
    "image-column": "text_column",
    "input-file": "source",
    "map": "prepare",
    "output-file": "sink",
    "served-model-name": "name",
}
"""Keyword arguments whose names are not those of their flags."""
LIMITS = frozenset({"buffer-memory", "max-attempts", "max-error-rate", "max-errors", "workers"})
"""In Python, fields of `Limits`."""
SWITCHES = frozenset(
    {
        "allow-pickled-weights",
        "dedupe",
        "enforce-eager",
        "engine-process",
        "ignore-changes",
        "overwrite",
        "trust-remote-code",
    }
)  # fmt: skip
"""Flags without a value."""
JOB_ONLY = LIMITS | {
    "id-column",
    "ignore-changes",
    "input-file",
    "input-format",
    "keep-columns",
    "limit",
    "map",
    "on-nan",
    "order",
    "output-file",
    "output-format",
    "overwrite",
    "sample",
    "sample-seed",
    "served-model-name",
    "shard",
    "sql",
    "trace",
    "worker-kind",
}
"""Flags that stay flags beside a file of steps or models, which has no keys for them."""
COMMAND_ONLY = frozenset(
    {
        "api-key-file",
        "batch-timeout-ms",
        "budgets",
        "data-parallel-size",
        "max-cost",
        "max-requests",
        "max-wait",
        "max-waiting-bytes",
        "on",
        "port",
        "replicas",
        "state-dir",
        "timeout",
    }
)
"""Flags that no function has; a message that names one speaks of the command."""

_VALUES = (
    r"\"[^\"]*\"|'[^']*'|\d+/\d+|\d[\d.]*|[A-Z]{3,}|[\w./-]+@REVISION|module:\w+|"
    r"auto|process|split|first|null|error|jsonl|csv|tsv|parquet|arrow|onnx|torch|custom|classify|generate|image-(?:embed|classify)|int8|float32|b?float16|cuda(?::\d+)?"
)
_FLAG = re.compile(rf"(?<![\w\-/.'\"=])--([a-z][a-z0-9-]*)(?:[ ]({_VALUES})(?![\w-]))?( (?=--))?|(?<!\S)-i (-)(?!\S)")

LONGEST_TOKEN = 300
"""Characters of a word or quoted value in a message: longer ones are shortened. A file's name has up to 255."""
LONGEST = 4000
"""Characters of a message."""
_HEAD, _TAIL = 120, 60
_LONG = re.compile(
    rf"(?<!\w)'(?:[^'\\]|\\.){{{LONGEST_TOKEN},}}'(?!\w)|(?<!\w)\"(?:[^\"\\]|\\.){{{LONGEST_TOKEN},}}\"(?!\w)"
    rf"|\S{{{LONGEST_TOKEN},}}",
    re.DOTALL,
)

_door: Door = "python"


def spoken() -> Door:
    """The door whose names messages use; Python's, unless `speak` was called."""
    return _door


def speak(door: Door) -> None:
    """Name settings in all further messages of this process as this door does."""
    global _door  # noqa: PLW0603 - a process has one door
    _door = door


def worded(message: str) -> str:
    """A message for the user, made from one that names settings by their flags and has values of any length."""
    return shortened(spelled(message))


def spelled(message: str) -> str:
    """The message with each flag as the door names the setting."""
    if _door == "flags" or "-" not in message:
        return message
    return _FLAG.sub(lambda found: _named(found, _door), message)


def _named(found: re.Match[str], door: Door) -> str:
    flag, value = found[1] or "input-file", found[2] or found[4]
    if flag in COMMAND_ONLY or (door == "keys" and flag in JOB_ONLY):
        return found[0]
    more = ", " if found[3] else ""
    name = KEYWORDS.get(flag, flag.replace("-", "_"))
    if value is None and flag in SWITCHES:
        value = "True" if door == "python" else "true"
    elif flag == "shard" and value is not None and door == "python":
        value = f"({value.replace('/', ', ')})"
    elif value is not None and door == "python" and not (value[0] in "\"'" or value[0].isdigit() or value.isupper()):
        value = f'"{value}"'  # a word, but not a placeholder such as FOLDER
    if value is None:
        return name + more
    given = f"{name}={value}" if door == "python" else f"{name}: {value}"
    return (f"limits=Limits({given})" if flag in LIMITS and door == "python" else given) + more


def shortened(message: str) -> str:
    """The message with long words and quoted values cut in their middle, their lengths told."""
    if len(message) < LONGEST_TOKEN:
        return message
    message = _LONG.sub(lambda found: _cut(found[0]), message)
    if len(message) <= LONGEST:
        return message
    head, tail = message[: LONGEST // 2].rpartition(" ")[0], message[-LONGEST // 4 :].partition(" ")[2]
    return f"{head} … {tail} ({len(message):,} characters in all)"


def shown(value: object, longest: int = 60) -> str:
    """A value for a message: its `repr`; of a longer one the ends of a text or the first items, and the length."""
    text = repr(value)
    if len(text) <= longest:
        return text
    if isinstance(value, str | bytes):
        return f"{text[: longest * 2 // 3]}…{text[-longest // 3 :]} ({len(value):,} characters)"
    head, comma, _ = text[:longest].rpartition(", ")
    return f"{head or text[:longest]}{comma}… ({len(text):,} characters)"


def _cut(token: str) -> str:
    quotes = 2 if token[0] in "'\"" and token[0] == token[-1] else 0
    return f"{token[:_HEAD]}…{token[-_TAIL:]} ({len(token) - quotes:,} characters)"
