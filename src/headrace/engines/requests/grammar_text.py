"""The form of an answer in llguidance's words, and whether llguidance can hold an answer to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping

from headrace.engines.requests.answer_parts import FAMILIES
from headrace.engines.requests.structure import Structure
from headrace.engines.requests.tools import ToolUse
from headrace.errors import RecordError
from headrace.extras import require
from headrace.records import Json, JsonObject

_WHAT = "an answer of a given form"
_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": True}
"""A model that may write any white space may never end."""
_LIMITS = {"initial_lexer_fuel": 200_000, "max_grammar_size": 200_000}
"""Steps of the work to compile a form; with them it takes less than a second."""
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP}-02-29)"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_PATTERNS = {"date": _DATE, "date-time": f"{_DATE}T{_TIME}"}
_NAMES = {"json": "schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}


def grammar_of(structure: Structure) -> str:
    """The form as llguidance takes it. Raises MissingExtraError: llguidance is not installed."""
    matcher = require("llguidance", "structured", _WHAT).LLMatcher
    match structure.kind:
        case "json":
            return str(matcher.grammar_from_json_schema(forced_schema(structure.value), overrides=_JSON))
        case "regex":
            return str(matcher.grammar_from_regex(structure.text))
        case "choice":
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in structure.value)
            return str(matcher.grammar_from_lark(f"start: {choices}"))
        case _:
            return str(matcher.grammar_from_lark(structure.text))


def limits() -> object:
    return require("llguidance", "structured", _WHAT).LLParserLimits(**_LIMITS)


def problem_in(structure: Structure) -> str | None:
    """Why no answer can be held to this form, whatever the model; None if one can."""
    matcher = require("llguidance", "structured", _WHAT).LLMatcher
    found = str(matcher.validate_grammar(grammar_of(structure), limits=limits()))
    return None if not found or found.startswith("WARNING") else worded(structure, found)


def worded(structure: Structure, problem: str) -> str:
    return f"the {_NAMES[structure.kind]} cannot be used: {' '.join(problem.split())[:300]}"


def calls_grammar(tools: ToolUse, family: str, form: Structure | None, special: Mapping[str, int]) -> str:
    """The grammar of an answer that calls one or more of some tools, or has a form instead.

    Args:
        tools: of the request; those that must be called if there is no form.
        form: of an answer without calls: a JSON schema.
        special: the special tokens that may stand in it, by their texts.
    """
    known = FAMILIES[family]
    quoted = _quoting(special)
    names = {name: f"call_{number}" for number, name in enumerate(tools.forced or tools.schemas)}
    again = "" if tools.single else f" ({quoted(known.between)} call)*"
    rules = ["start: calls" + ("" if form is None else f" | {_value(form.value)}")]
    rules += [f"calls: {quoted(known.opens)} call{again} {quoted(known.closes)}", f"call: {' | '.join(names.values())}"]
    for name, rule in names.items():
        schema = tools.schemas[name]
        value = _elements(rule, schema, quoted, rules) if known.parameters else _value(schema)
        rules.append(f"{rule}: {quoted(known.before.format(name=name))} {value} {quoted(known.after)}")
    return "\n".join(rules)


def calls_schema(tools: ToolUse) -> JsonObject:
    """The JSON schema of a list of calls of the tools that must be called.

    Raises:
        RecordError: two tools define other schemas under one name.
    """
    definitions: dict[str, Json] = {}
    calls = []
    for name in tools.forced:
        schema = dict(tools.schemas[name])
        for key, inner in schema.pop("$defs", {}).items():
            if definitions.setdefault(key, inner) != inner:
                raise RecordError(f"two tools define {key!r} in $defs, and not as the same: rename one", param="tools")
        fields = {"name": {"const": name}, "parameters": schema}
        call = {"type": "object", "properties": fields, "required": ["name", "parameters"]}
        calls.append({**call, "additionalProperties": False})
    several: JsonObject = {"maxItems": 1} if tools.single else {}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions, **several}


def _quoting(special: Mapping[str, int]) -> Callable[[str], str]:
    """Writes a text into a grammar: in quotation marks, special tokens by their ids."""
    marks = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else re.compile("(?!)")

    def quoted(text: str) -> str:
        parts = (f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
                 for part in marks.split(text) if part)  # fmt: skip
        return " ".join(parts) or '""'

    return quoted


def _value(schema: Json) -> str:
    return f"%json {forced_schema({'x-guidance': _JSON, **schema})}"


def forced_schema(schema: Json) -> str:
    return json.dumps(_dated(schema))


def _dated(schema: Json) -> Json:
    """The schema, whose dates are such as exist: llguidance's own format has 29 February in all years."""
    if isinstance(schema, list):
        return [_dated(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = ("default", "examples", "const", "enum")
    found = {name: part if name in kept else _dated(part) for name, part in schema.items()}
    pattern = _PATTERNS.get(str(found.get("format")))
    if pattern is None or found.get("type") != "string" or "pattern" in found:
        return found
    del found["format"]
    return {**found, "pattern": f"^{pattern}$"}


def _elements(rule: str, schema: Json, quoted: Callable[[str], str], rules: list[str]) -> str:
    """Rules for arguments that are elements, in the order of the schema."""
    needed: Collection[str] = schema.get("required") or ()
    parts = []
    for number, (name, inner) in enumerate((schema.get("properties") or {}).items()):
        is_text = isinstance(inner, Mapping) and inner.get("type") == "string" and "enum" not in inner
        value = r"/([^<]|<[^\/])*/" if is_text else _value({**inner, "$defs": schema.get("$defs", {})})
        element = f"{quoted(f'<parameter={name}>' + chr(10))} {value} {quoted(chr(10) + '</parameter>' + chr(10))}"
        rules.append(f"{rule}_{number}: {element}")
        parts.append(f"{rule}_{number}" + ("" if name in needed else "?"))
    return " ".join(parts) or '""'
