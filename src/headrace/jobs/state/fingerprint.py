"""Compare the settings that an output was started with to the present ones."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.engines.choosing.registry import declared_engines
from headrace.errors import ResumeMismatchError
from headrace.options import NAMES, declared

_UNSAID = {"engine.pixels": "exact"}
"""What a fingerprint means that says nothing of these, where that is not the default of today."""
_DIGESTS = {"engine.model_digest": "the model's folder", "engine.handler_digest": "the handler"}


def check_same(output: object, then: Mapping[str, object], now: Mapping[str, object], *, retry: bool = False) -> None:
    """Check that a job matches the one that started its output.

    Raises:
        ResumeMismatchError: it does not; the message names each difference.
    """
    if differences := _differences(then, now):
        ways = (
            "or pass ``ignore_changes=True`` to retry with what is there now"
            if retry
            else "choose another output, pass ``overwrite=True`` to start again, or ``ignore_changes=True`` to keep "
            "what is finished and continue"
        )
        raise ResumeMismatchError(f"{output} was started with other settings: {differences}. Restore that, {ways}")


def check_same_input(output: object, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Check that a finished job has the input that it had, if other changes are to be ignored.

    Raises:
        ResumeMismatchError: it has not, and would never read the new rows.
    """
    if differences := _differences({"source": then.get("source")}, {"source": now.get("source")}):
        raise ResumeMismatchError(
            f"{output} is finished, and its input has changed since: {differences}. Write to another output, or pass "
            "``overwrite=True`` to start again"
        )


def _differences(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    old, new = _flat(then), _flat(now)
    return "; ".join(
        _difference(key, old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    )


def _difference(key: str, old: object, new: object) -> str:
    setting = _setting(key)
    if (what := _content(key)) and old and new:  # a digest tells people nothing
        return f"the content of {what} has changed{setting and f' (``{setting}``)'}"
    return f"{f'``{setting}``' if setting else key} was {_shown(old, key)}, now {_shown(new, key)}"


def _setting(key: str) -> str:
    """The setting that a key of the fingerprint is of; empty if it is of none."""
    section, _, name = key.rpartition(".")
    if key in ("engine.commit", "engine.model_digest"):
        return "model"
    if section in ("", "source.selection"):
        return name if name in NAMES and NAMES[name].changes_output else ""
    if section == "engine.options":
        return name
    return name if section in ("engine", "engine.sampling") and name in _engine_options() else ""


def _engine_options() -> set[str]:
    """What engines describe under the names of their options."""
    return {one.name for kind in declared_engines() for one in declared(kind)}


def _shown(value: object, key: str) -> str:
    value = _UNSAID.get(key) if value is None else value
    return "not set" if value is None else repr(value)


def _content(key: str) -> str:
    """What a digest is of; empty for other settings."""
    if key in _DIGESTS:
        return _DIGESTS[key]
    name, _, last = key.rpartition(".")
    if last not in ("blake2b", "tag", "fingerprint") or not name.startswith("source"):
        return ""
    return name.partition(".files.")[2] or "the input"


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys; values as JSON gives them back."""
    flat: dict[str, object] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(inner))
    return flat
