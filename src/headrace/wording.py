"""How messages are worded: settings are named as the user gives them, and long values are shortened.

A message names a setting by its keyword between double backticks, with a value or without: "pass ``overwrite=True``",
"another ``id_column``", "``dtype=float32, ignore_changes=True``". Words need no quotes. The user reads
`--dtype float32 --ignore-changes` on the command line, `dtype="float32", ignore_changes=True` in Python, and
`dtype: float32` beside a file of settings. "``headrace serve state=DIR``" is a command line in all three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from headrace.options import NAMES

Interface: TypeAlias = Literal["python", "flags", "keys"]
"""How the user gives settings: keyword arguments, flags of a command, or keys of a file."""

_MARKED = re.compile(r"``(headrace \w+ )?(.+?)``")
_SEVERAL = re.compile(r"[a-z_]+(=[^\s,]+)?(, [a-z_]+(=[^\s,]+)?)+")

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

_interface: Interface = "python"
_variables: Mapping[str, tuple[str, str]] = {}


def spoken() -> Interface:
    """The interface whose names messages use; Python's, unless `speak` was called."""
    return _interface


def speak(interface: Interface, variables: Mapping[str, tuple[str, str]] | None = None) -> None:
    """Name settings in all further messages of this process as this interface does.

    Args:
        interface: how the user gives settings.
        variables: the environment variable and its text, for settings that are given so; None for those of before.
    """
    global _interface, _variables
    _interface, _variables = (
        interface,
        variables or ({} if interface == "python" or variables is not None else _variables),
    )


def worded(message: str) -> str:
    """A message for the user, made from one that marks settings and has values of any length."""
    return shortened(spelled(message))


def spelled(message: str, interface: Interface | None = None) -> str:
    """The message with each setting as the interface names it; None for the interface of this process."""
    if "``" not in message:
        return message
    return _MARKED.sub(lambda found: _named(found[1] or "", found[2], interface or _interface), message)


_TRUTHS = ("True", "False")
_OF_SHELLS = (";", "|", "&", "*")
"""Values that a shell takes as its own without quotes."""


def flag_of(name: str) -> str:
    """The flag of the setting with this keyword."""
    return NAMES[name].flag if name in NAMES else "--" + name.replace("_", "-")


def _named(command: str, settings: str, interface: Interface) -> str:
    """Settings as an interface names them, such as `overwrite=True, dtype=float32`."""
    several = settings.split(", ") if _SEVERAL.fullmatch(settings) else [settings]
    each = [one.partition("=")[::2] for one in several]
    if command or interface == "flags":
        return command + " ".join(_as_flag(name, value, bool(command)) for name, value in each)
    return ", ".join(_as_keyword(name, value, interface) for name, value in each)


def _as_flag(name: str, value: str, elsewhere: bool = False) -> str:
    """A setting as a flag, or as the variable that gives it, if it has that value; `elsewhere` it gives nothing."""
    variable, text = _variables.get(NAMES[name].keyword if name in NAMES else name, ("", ""))
    if variable and not elsewhere and value in ("", text):
        return f"{variable}={value}" if value else variable
    if value == "False":
        return flag_of(f"no_{name}")
    value = f"'{value}'" if value in _OF_SHELLS else value
    return f"{flag_of(name)} {value}" if value not in ("", "True") else flag_of(name)


def _as_keyword(name: str, value: str, interface: Interface) -> str:
    known = NAMES.get(name)
    if interface == "keys" and not (known is not None and known.is_key):
        return _as_flag(name, value)
    name = name if known is None else known.keyword
    if not value:
        return name
    if interface == "keys":
        return f"{name}: {value.lower() if value in _TRUTHS else value}"
    if re.fullmatch(r"\d+/\d+", value):
        value = f"({value.replace('/', ', ')})"
    elif value not in _TRUTHS and not (value[0] in "\"'" or value[0].isdigit() or value.isupper()):
        value = f'"{value}"'  # a word, but not a placeholder such as FOLDER
    return f"{name}={value}"


def shortened(message: str) -> str:
    """The message with long words and quoted values cut in their middle, their lengths told."""
    if len(message) < LONGEST_TOKEN:
        return message
    message = _LONG.sub(lambda found: _cut(found[0]), message)
    if len(message) <= LONGEST:
        return message
    head, tail = message[: LONGEST // 2].rpartition(" ")[0], message[-LONGEST // 4 :].partition(" ")[2]
    return f"{head} … {tail} ({len(message):,} characters in all)"


def with_trust(reason: str) -> str:
    """Why a server cannot be reached, with the way out if its certificate is not trusted."""
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return reason
    return f"{reason}; to trust it, name the file of its certificate or authority (PEM) in SSL_CERT_FILE"


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
