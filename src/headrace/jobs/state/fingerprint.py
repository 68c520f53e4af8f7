"""Compare the settings that an output was started with to the present ones."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.engines.choosing.registry import declared_engines
from headrace.errors import ResumeMismatchError
from headrace.options import NAMES, declared

_UNSAID = {"engine.pixels": "exact"}
"""The value of a fact that an older fingerprint lacks, where it differs from today's default."""
_INPUT = ("source", "sql")
GIVEN = "given"
"""The options of an engine's factory among the facts of an engine that describes itself by its name alone."""
_DIGESTS = {"engine.model_digest": "the model's folder", "engine.handler_digest": "the handler"}


def check_same(
    output: object,
    then: Mapping[str, object],
    now: Mapping[str, object],
    asked: tuple[Mapping[str, object] | None, Mapping[str, object] | None] = (None, None),
    *,
    retry: bool = False,
    finished: bool = False,
) -> None:
    """Check that a job matches the one that started its output.

    Args:
        then: the facts that determined it, and `now`: those of this job.
        asked: the settings of both jobs, as `jobs.settings.as_json` has them, which say why facts differ.
        retry: whether failed records are to be retried.
        finished: whether the job has ended, so that it takes no more rows.

    Raises:
        ResumeMismatchError: it does not; the message names each difference.
    """
    if differences := _differences(_comparable(then, now), now, *asked):
        ways = (
            "or pass ``ignore_changes=True`` to retry with what is there now"
            if retry
            else "write to another output, or pass ``overwrite=True`` to start again: a finished job takes no more rows"
            if finished and has_other_input(then, now)
            else "choose another output, pass ``overwrite=True`` to start again, or ``ignore_changes=True`` to keep "
            "what is finished and continue"
        )
        raise ResumeMismatchError(f"{output} was started with other settings: {differences}. Restore that, {ways}")


def with_options(
    facts: Mapping[str, object], then: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, object]:
    """What an engine says of itself once these of its options have changed, as far as that is sure before it is loaded.

    An option is sure if the engine notes it as it is given. A number may be lowered to what the model can do, and
    ``auto`` stands for what it finds.

    Args:
        facts: what the engine said with the options of then.
    """
    found = dict(facts)
    for name, value in now.items():
        old = facts.get(name)
        is_noted = type(value) is type(old) and then.get(name) in (None, old) and value not in (then.get(name), "auto")
        is_lower = isinstance(value, int) and isinstance(old, int) and 0 <= value <= old
        if is_noted and (is_lower or isinstance(value, (str, bool, float))):
            found[name] = value
    for name in ("sampling", GIVEN):
        if isinstance(inner := facts.get(name), Mapping):
            found[name] = with_options(inner, then, now)
    return found


def has_other_input(then: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether the input of a job, whose facts are `now`, is not that of then."""
    return bool(_changed({"source": then.get("source")}, {"source": now.get("source")}))


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


def _comparable(then: Mapping[str, object], now: Mapping[str, object]) -> Mapping[str, object]:
    """The facts of then, with those of now that earlier versions did not note: the options of a factory."""
    old, new = then.get("engine"), now.get("engine")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and GIVEN in new and GIVEN not in old:
        return {**then, "engine": {**old, GIVEN: new[GIVEN]}}
    return then


def _differences(
    then: Mapping[str, object],
    now: Mapping[str, object],
    asked_then: Mapping[str, object] | None = None,
    asked_now: Mapping[str, object] | None = None,
) -> str:
    asked = _changed(_asked(asked_then), _asked(asked_now)) if asked_then and asked_now else {}
    found: dict[str, str] = {}
    for key, (old, new) in _changed(then, now).items():
        setting, of_input = _setting(key), key.startswith("source.")
        why = [name for name in asked if name == setting or (not setting and (name in _INPUT) is of_input)]
        found |= {name: _told(f"``{name}``", *asked[name]) for name in why}
        if not why:
            found.setdefault(setting or key, _difference(key, old, new))
    return "; ".join(found.values())


def _changed(then: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    old, new = _flat(then), _flat(now)
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def _asked(settings: Mapping[str, object] | None) -> dict[str, object]:
    """What the user chose of input and engine, by the names of the settings."""
    given = settings or {}
    options = given.get("engine_options")
    chosen = {name: given.get(name) for name in (*_INPUT, "model", "engine")}
    return {**chosen, **(options if isinstance(options, Mapping) else {})}


def _difference(key: str, old: object, new: object) -> str:
    setting = _setting(key)
    if (what := _content(key)) and old and new:  # a digest tells people nothing
        return f"the content of {what} has changed{setting and f' (``{setting}``)'}"
    way_out = f" (pass ``task={old}``)" if key == "task" and new == "custom" else ""
    return _told(f"``{setting}``" if setting else _in_words(key), old, new, key) + way_out


def _told(name: str, old: object, new: object, key: str = "") -> str:
    return f"{name} was {_shown(old, key)}, now {_shown(new, key)}"


def _in_words(key: str) -> str:
    """What a fact is called that no setting has, such as `source.bytes`."""
    section, _, name = key.rpartition(".")
    section = {"source": "input"}.get(section, section.partition(".files.")[2] or section)
    owner = f"the {section}" if section in ("input", "engine", "step") else section
    words = {"bytes": "size in bytes", "records": "number of records"}.get(name, name.replace("_", " "))
    return f"{owner}'s {words}" if owner else key


def _setting(key: str) -> str:
    """The setting that a key of the fingerprint is of; empty if it is of none."""
    section, _, name = key.rpartition(".")
    if key in ("engine.commit", "engine.model", "engine.model_digest"):
        return "model"
    if key == "engine.engine_seed":
        return "seed"
    if section in ("", "source.selection"):
        return name if name in NAMES and NAMES[name].changes_output else ""
    if section in ("engine.options", f"engine.{GIVEN}"):
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
