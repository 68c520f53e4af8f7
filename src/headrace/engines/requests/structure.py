"""The form that an answer must have: a JSON schema, a regular expression, one of some texts, or a grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from headrace.errors import RecordError, nearest
from headrace.records import Json
from headrace.wording import shown

StructureKind: TypeAlias = Literal["json", "regex", "choice", "grammar"]

_KINDS: tuple[StructureKind, ...] = ("json", "regex", "choice", "grammar")
_OLDER = {f"guided_{kind}": kind for kind in _KINDS}
"""vLLM's older names."""
NO_FORMS = "unsupported_form"
"""The code of a RecordError: no answer of the model can be held to any form."""
FIELDS = ("response_format", "structured_outputs", *_OLDER)
"""The fields of a request body that say it; of these, a request has one."""
_ANY_OBJECT: Mapping[str, Json] = {"type": "object"}
MOST_LEVELS = 120
"""The most levels of a schema: llguidance reads 127, with what is put around it."""
MOST_STATES = 20_000
"""The most characters of a regular expression with its repeats written out: compilers take seconds for a million."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer."""

    kind: StructureKind
    text: str
    """The schema or the list of choices as JSON; the regular expression or the grammar itself."""
    options: str = "{}"
    """Further fields of `structured_outputs` that the engine takes, as JSON."""
    said_in: str = field(default="structured_outputs", compare=False)
    """The field of the request that says it."""

    @property
    def value(self) -> Json:
        """The schema, the list of choices, the regular expression or the grammar."""
        return json.loads(self.text) if self.kind in ("json", "choice") else self.text

    @property
    def lenient(self) -> Structure:
        """The same form; of a schema, only what llguidance can force is forced."""
        if self.kind != "json":
            return self
        return replace(self, text=json.dumps({"x-guidance": {"lenient": True}, **self.value}, separators=(",", ":")))

    @classmethod
    def of(
        cls, kind: StructureKind, value: Json, said_in: str = "structured_outputs", options: Json = None
    ) -> Structure:
        """Check a form without a grammar's compiler, as far as that is possible.

        Args:
            value: a schema, also as JSON text; a list of texts; a regular expression; a grammar.
            said_in: the field of the request that says it.

        Raises:
            RecordError: it has another type, or nothing can have this form.
        """
        if kind == "json":
            value = _schema(value, said_in)
        elif kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise RecordError(f"{said_in} is {shown(value)}: it must be a list of texts, none empty", param=said_in)
        elif not isinstance(value, str) or not value:
            raise RecordError(f"{said_in} is {shown(value)}: it must be a text, not empty", param=said_in)
        if kind == "regex":
            _check_size(value, said_in)
        text = value if kind in ("regex", "grammar") else json.dumps(value, separators=(",", ":"))
        return cls(kind, text, json.dumps(options or {}, sort_keys=True), said_in)


def structure_in(body: Mapping[str, Json], options: Collection[str] = ()) -> Structure | None:
    """The form that a request body asks for: OpenAI's `response_format`, or `structured_outputs` as in vLLM.

    Args:
        options: further fields of `structured_outputs` that the engine takes.

    Raises:
        RecordError: the form is invalid, or the body asks for two.
    """
    given = [name for name in FIELDS if body.get(name) is not None and body[name] != {"type": "text"}]
    if not given:
        return None
    if len(given) > 1:
        raise RecordError(f"{given[0]} and {given[1]} both say the form of the answer: give one", param=given[1])
    [name] = given
    value = body[name]
    if name in _OLDER:
        return Structure.of(_OLDER[name], value, name)
    return _of_format(value) if name == "response_format" else _of_vllm(value, options)


def _of_format(given: Json) -> Structure:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "json_object":
        return Structure.of("json", _ANY_OBJECT)
    inner = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise RecordError(
            f"response_format is {shown(given)}: its type must be text, json_object, or json_schema with "
            '"json_schema": {"name": ..., "schema": {...}}',
            param="response_format",
        )
    return Structure.of("json", inner["schema"], "response_format.json_schema.schema")


def _of_vllm(given: Json, options: Collection[str]) -> Structure:
    said_in = "structured_outputs"
    if not isinstance(given, Mapping):
        raise RecordError(
            f'{said_in} is {shown(given)}: it must be an object, such as {{"regex": "[0-9]+"}}', param=said_in
        )
    known = (*_KINDS, "json_object", *options)
    if unknown := [name for name in given if name not in known]:
        meant = nearest(unknown[0][:60], known)
        raise RecordError(f"{said_in} has an unknown {unknown[0]!r}; known: {', '.join(known)}{meant}", param=said_in)
    found = {name: given[name] for name in (*_KINDS, "json_object") if given.get(name) not in (None, False)}
    if len(found) != 1:
        raise RecordError(
            f"{said_in} has {' and '.join(map(repr, found)) or 'no form'}: give one of {', '.join(known)}",
            param=said_in,
        )
    more = {name: given[name] for name in options if given.get(name) is not None}
    if "json_object" in found:
        return Structure.of("json", _ANY_OBJECT, said_in, more)
    [(kind, value)] = found.items()
    return Structure.of(next(one for one in _KINDS if one == kind), value, f"{said_in}.{kind}", more)


def _schema(given: Json, said_in: str) -> Mapping[str, Json]:
    """The schema. Raises RecordError: it is no object, or no finite value can satisfy it."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            pass
    if not isinstance(given, Mapping):
        raise RecordError(f"{said_in} is {shown(given)}: a JSON schema is an object", param=said_in)
    check_parts(given, said_in)
    for place, part in _parts(given, ()):
        if isinstance(part, Mapping) and part.get("enum") == [] and place[-1:] != ("properties",):
            raise RecordError(f"{said_in}: the enum at {'/'.join(place) or 'the top'} is empty", param=said_in)
        if place[-1:] == ("pattern",) and isinstance(part, str):
            _check_size(part, said_in)
    if not _has_finite_value(given):
        raise RecordError(
            f"{said_in}: the schema refers to itself in a field that each value must have, so that no value ends; "
            "make the field optional, or allow null",
            param=said_in,
        )
    return given


def check_parts(schema: Json, said_in: str) -> None:
    """Refuse a schema that is nested too deep for the functions that walk through it, or holds no number of JSON's."""
    level: Sequence[Json] = [schema]
    for _ in range(MOST_LEVELS):
        if bad := [one for one in level if isinstance(one, float) and not math.isfinite(one)]:
            raise RecordError(f"{said_in} holds the number {bad[0]}: give one that JSON has", param=said_in)
        parts = (
            part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else () for part in level
        )
        level = [inner for part in parts for inner in part]
        if not level:
            return
    raise RecordError(
        f"{said_in} has more than {MOST_LEVELS} levels of objects and lists: make it flatter", param=said_in
    )


def _check_size(regex: str, said_in: str) -> None:
    states = written_out(regex)
    if states > MOST_STATES:
        raise RecordError(
            f"{said_in}: the regular expression {shown(regex, 40)} has {states:,} characters with its repeats written "
            f"out, more than {MOST_STATES:,}",
            param=said_in,
        )


def written_out(regex: str) -> int:
    """The characters of a regular expression if its counted repeats are written out. An invalid one has any number."""
    groups, atom = [0], 0
    for part in _PIECES.finditer(regex):
        text = part[0]
        if text == "(":
            groups[-1] += atom
            groups.append(0)
            atom = 0
        elif text == ")" and len(groups) > 1:
            atom += groups.pop()
        elif part["least"] is not None:
            atom *= max(int(part["most"] or part["least"]), 1)
        else:
            groups[-1] += atom
            atom = 1
    return sum(groups) + atom


_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.", re.DOTALL)


def _parts(value: Json, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Json]]:
    yield place, value
    inner: Sequence[tuple[str, Json]] = ()
    if isinstance(value, Mapping):
        inner = [(str(key), part) for key, part in value.items() if key not in ("default", "examples", "const")]
    elif isinstance(value, list):
        inner = [(str(number), part) for number, part in enumerate(value)]
    for key, part in inner:
        yield from _parts(part, (*place, key))


def _has_finite_value(schema: Mapping[str, Json]) -> bool:
    """Whether some value of a schema ends, although it may refer to itself."""
    references = {part for place, part in _parts(schema, ()) if place[-1:] == ("$ref",) and isinstance(part, str)}
    ending: set[str] = set()
    while found := {one for one in references - ending if _ends(referred(schema, one), ending)}:
        ending |= found
    return _ends(schema, ending)


def _ends(part: Json, ending: Collection[str]) -> bool:
    """Whether a value of this part of a schema ends, if those of these references do."""
    if not isinstance(part, Mapping):
        return True
    reference, options = part.get("$ref"), part.get("anyOf") or part.get("oneOf")
    if isinstance(reference, str):
        return reference in ending
    if isinstance(options, list) and not any(_ends(option, ending) for option in options):
        return False
    needed = list(part["allOf"]) if isinstance(part.get("allOf"), list) else []
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, Mapping) and isinstance(required, list):
        needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    if isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        needed.append(part.get("items"))
    return all(_ends(one, ending) for one in needed)


def referred(schema: Mapping[str, Json], reference: str) -> Json:
    """What a reference within the schema refers to; None if there is nothing, which the compiler refuses."""
    part: Json = schema
    for key in reference.removeprefix("#").strip("/").split("/") if reference.strip("#/") else ():
        part = part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
