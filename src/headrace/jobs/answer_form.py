"""The form of a job's answers: said in the prompt, forced where the engine can, checked, and asked for again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.engines.requests.formed import Try
from headrace.engines.requests.structure import Structure, referred
from headrace.errors import ConfigError, RecordError
from headrace.extras import require
from headrace.records import Json, JsonObject, Shape
from headrace.wording import shown

if TYPE_CHECKING:
    from headrace.jobs.settings import JobSettings

_SAYS = ("type", "properties", "anyOf", "oneOf", "allOf", "enum", "const", "$ref")
"""Keywords of which a schema has one."""
_SHOWN = 200
_MATCH_S = 1.0
"""How long an answer may take to be compared with a regular expression: some expressions would take years."""
_FORMS = ("output_schema", "answer_regex", "choices")


class InvalidAnswerError(RecordError):
    """An answer does not have its form.

    Args:
        message: what is wrong, for the model too.
        text: the answer.
        may_pass: whether to ask again.
        before: earlier answers that lacked it.
    """

    def __init__(self, message: str, text: str = "", *, may_pass: bool = False, before: tuple[Try, ...] = ()) -> None:
        super().__init__(message)
        self.text = text
        self.may_pass = may_pass
        self.before = before


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What each answer of a job must be. Raises ConfigError: it is invalid."""

    structure: Structure
    words: str
    """What the prompt says before all else; empty for nothing."""
    reask: int
    """How often a record is asked again at most."""
    validator: Json = None
    """A `jsonschema` validator, which checks a value by the schema; None without a schema."""
    shape: Shape = "string"
    """The type of the field `parsed`."""

    @classmethod
    def of(cls, settings: JobSettings) -> AnswerForm | None:
        """The form that the settings give; None for none."""
        forms = {name: value for name in _FORMS if (value := getattr(settings, name)) not in (None, ())}
        if len(forms) > 1:
            raise ConfigError(f"{' and '.join(f'``{name}``' for name in forms)} both say the form of answers: give one")
        if not forms:
            return None
        [(name, value)] = forms.items()
        reask, in_prompt = settings.reask, settings.schema_in_prompt
        if name == "output_schema":
            return cls.of_schema(value, reask, in_prompt=in_prompt)
        made = cls.of_regex if name == "answer_regex" else cls.of_choices
        return made(value, reask, in_prompt=in_prompt)

    @classmethod
    def of_schema(cls, schema: JsonObject, reask: int, *, in_prompt: bool) -> AnswerForm:
        """The form of a JSON schema."""
        library = require("jsonschema", "structured", "``output_schema``")
        structure = _structure("json", schema, "output_schema")
        kind: Json = library.validators.extend(library.Draft202012Validator, {"pattern": _pattern_errors})
        try:
            kind.check_schema(schema)
        except library.exceptions.SchemaError as error:
            place = "/".join(map(str, error.absolute_path)) or "the top"
            raise ConfigError(f"``output_schema`` is no JSON schema: at {place}: {error.message}") from None
        words = f"Answer with JSON that follows this JSON schema, and with nothing else:\n{structure.text}"
        validator = kind(schema, format_checker=library.FormatChecker())
        return cls(structure, words if in_prompt else "", reask, validator, shape_of(schema, schema))

    @classmethod
    def of_regex(cls, regex: str, reask: int, *, in_prompt: bool) -> AnswerForm:
        """The form of a regular expression, which the whole answer matches."""
        try:
            re.compile(regex)
        except re.error as error:
            raise ConfigError(f"``answer_regex`` is {shown(regex)}: {error}") from None
        require("regex", "structured", "``answer_regex``")
        words = f"Answer with text that matches this regular expression, and with nothing else: {regex}"
        return cls(_structure("regex", regex, "answer_regex"), words if in_prompt else "", reask)

    @classmethod
    def of_choices(cls, choices: Sequence[str], reask: int, *, in_prompt: bool) -> AnswerForm:
        """One of some texts."""
        words = f"Answer with one of these, and with nothing else: {', '.join(choices)}"
        return cls(_structure("choice", list(choices), "choices"), words if in_prompt else "", reask)

    def describe(self) -> dict[str, object]:
        """What of it determines the output, by the names of the settings."""
        return {self.structure.said_in.strip("`"): self.structure.value, "schema_in_prompt": bool(self.words)}

    def checked(self, output: object) -> object:
        """The output of an engine; with `parsed` if there is a schema: the value, with all its fields.

        Raises:
            InvalidAnswerError: it does not have the form.
        """
        answer: Mapping[str, object] = output if isinstance(output, Mapping) else {"text": output}
        text = answer.get("text")
        if not isinstance(text, str):
            raise InvalidAnswerError(f"the engine's output has no text: {shown(output)}", "", may_pass=False)
        try:
            value = self._value(text)
        except ValueError as error:
            if answer.get("finish_reason") == "length":
                cut = f"the answer was cut after {len(text)} characters: raise ``max_tokens``, or shorten the prompt"
                words = f"{cut}; {error}"
                raise InvalidAnswerError(words, text, may_pass=False) from None
            raise InvalidAnswerError(str(error), text, may_pass=True) from None
        if self.validator is None:
            return output
        return {**answer, "parsed": _typed(value, self.shape)}

    def _value(self, text: str) -> Json:
        if self.structure.kind == "choice":
            if text.strip() not in self.structure.value:
                raise ValueError(f"it must be one of {', '.join(map(repr, self.structure.value))}"[:_SHOWN])
            return text.strip()
        if self.structure.kind == "regex":
            if not _matches("fullmatch", self.structure.text, text):
                raise ValueError(f"it must match the regular expression {self.structure.text}"[:_SHOWN])
            return text
        assert self.validator is not None, "a schema has one"
        try:
            value = json.loads(_unfenced(text), parse_constant=_no_constant)
            worst = next(iter(self.validator.iter_errors(value)), None)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON: {error.msg} at character {error.pos}") from None
        if worst is not None:
            place = "/".join(map(str, worst.absolute_path))
            raise ValueError(f"{place + ': ' if place else ''}{worst.message}"[:_SHOWN])
        return value


def schema_of(given: object) -> JsonObject:
    """The JSON schema that a setting gives: a file, a schema, or in Python a class or a dict of types.

    Objects take no other fields than those of their `properties`, unless they say so.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, (str, Path)):
        given = _read(str(given))
    elif isinstance(given, Mapping) and given and not _is_json(given):
        given = _of_class({str(name): (kind, ...) for name, kind in given.items()})
    elif isinstance(given, type) or dataclasses.is_dataclass(given):
        given = _of_class(given)
    if not isinstance(given, Mapping) or not any(word in given for word in _SAYS):
        raise ConfigError(
            f"``output_schema`` is {shown(given)}: it must be a JSON schema, such as "
            '{"type": "object", "properties": {...}}, or a file with one; in Python also a class of pydantic, a '
            "dataclass or a dict of types"
        )
    try:
        return dict(_closed(given))
    except RecursionError:
        raise ConfigError("``output_schema`` is nested too deep: make it flatter") from None


def _of_class(kind: object) -> Json:
    library = require("pydantic", "structured", "a class or a dict of types as ``output_schema``")
    try:
        if isinstance(kind, dict):
            kind = library.create_model("Answer", **kind)
        return library.TypeAdapter(kind).json_schema()
    except (library.errors.PydanticUserError, library.errors.PydanticSchemaGenerationError) as error:
        raise ConfigError(
            f"``output_schema``: {shown(kind)} has no JSON schema: {str(error).splitlines()[0]}"
        ) from None


def _read(name: str) -> Json:
    try:
        return json.loads(name if name.lstrip().startswith("{") else Path(name).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read ``output_schema`` {name}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"``output_schema`` {shown(name)} is no JSON: {error}") from None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except RecursionError:
        raise ConfigError("``output_schema`` is nested too deep: make it flatter") from None
    except (TypeError, ValueError):
        return False
    return True


def _structure(kind: Json, value: object, name: str) -> Structure:
    try:
        return Structure.of(kind, value, f"``{name}``")
    except RecordError as error:
        raise ConfigError(str(error)) from None


def _closed(schema: Json) -> Json:
    """The schema, whose objects with `properties` take no others unless they say so."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: part if name in ("default", "examples", "const", "enum") else _closed(part)
             for name, part in schema.items()}  # fmt: skip
    if isinstance(found.get("properties"), Mapping) and found.get("type", "object") == "object":
        found.setdefault("additionalProperties", False)
    return found


def _pattern_errors(validator: Json, pattern: str, instance: object, schema: object) -> Iterator[Exception]:
    """`jsonschema`'s check of the keyword `pattern`, in limited time."""
    del schema
    if validator.is_type(instance, "string") and not _matches("search", pattern, str(instance)):
        failed = require("jsonschema", "structured", "``output_schema``").ValidationError
        yield failed(f"{instance!r} does not match {pattern!r}")


def _matches(how: Literal["fullmatch", "search"], pattern: str, text: str) -> bool:
    """Whether the text matches. Raises ValueError: it takes too long to find out."""
    library = require("regex", "structured", "a regular expression")
    try:
        return getattr(library, how)(pattern, text, timeout=_MATCH_S, concurrent=True) is not None
    except TimeoutError:
        raise ValueError(
            f"to compare it with the regular expression {shown(pattern)} takes more than {_MATCH_S:g} s: use one "
            "without repetitions inside repetitions"
        ) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"it is no JSON: {name}")


def _unfenced(text: str) -> str:
    """The text without a fence of Markdown around it."""
    found = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    return found[1] if found else text


def shape_of(part: Json, schema: JsonObject, refs: tuple[str, ...] = ()) -> Shape:
    """The type that the values of a part of a schema have in every row; "json" where it varies."""
    if not isinstance(part, Mapping):
        return "json"
    reference, options = part.get("$ref"), _options(part)
    if isinstance(reference, str):
        return "json" if reference in refs else shape_of(referred(schema, reference), schema, (*refs, reference))
    if len(options) == 1:
        return shape_of(options[0], schema, refs)
    kinds = part.get("type")
    kind = _one([one for one in kinds if one != "null"] if isinstance(kinds, list) else [kinds])
    if kind == "object" and isinstance(part.get("properties"), Mapping) and part.get("additionalProperties") is False:
        return {name: shape_of(inner, schema, refs) for name, inner in part["properties"].items()} or "json"
    if kind == "array" and isinstance(part.get("items"), Mapping):
        return [shape_of(part["items"], schema, refs)]
    if kind in ("integer", "number", "boolean", "string"):
        return str(kind)
    values = part.get("enum", [part["const"]] if "const" in part else None)
    return "string" if values and all(one is None or isinstance(one, str) for one in values) else "json"


def _one(values: Sequence[Json]) -> Json:
    return values[0] if len(values) == 1 else None


def _options(part: Mapping[str, Json]) -> list[Json]:
    found = part.get("anyOf") or part.get("oneOf")
    return [one for one in found if one != {"type": "null"}] if isinstance(found, list) else []


def _typed(value: Json, shape: Shape) -> Json:
    """A value of this shape, with all fields of its objects."""
    if value is None:
        return None
    if isinstance(shape, dict):
        return {name: _typed(value.get(name), inner) for name, inner in shape.items()}
    if isinstance(shape, list):
        return [_typed(one, shape[0]) for one in value]
    if shape == "json":
        return json.dumps(value, ensure_ascii=False)
    return {"number": float, "integer": int}.get(shape, lambda own: own)(value)
