"""The form of an answer in llguidance's words, and whether llguidance can hold an answer to it."""

from __future__ import annotations

import json

from headrace.engines.requests.structure import Structure
from headrace.extras import require

_WHAT = "an answer of a given form"
_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": True}
"""A model that may write any white space may never end."""
_LIMITS = {"initial_lexer_fuel": 200_000, "max_grammar_size": 200_000}
"""Of the work to compile a form; with them it takes less than a second."""
_NAMES = {"json": "schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}


def grammar_of(structure: Structure) -> str:
    """The form as llguidance takes it.

    Raises:
        MissingExtraError: llguidance is not installed.
    """
    matcher = require("llguidance", "structured", _WHAT).LLMatcher
    match structure.kind:
        case "json":
            return str(matcher.grammar_from_json_schema(structure.text, overrides=_JSON))
        case "regex":
            return str(matcher.grammar_from_regex(structure.text))
        case "choice":
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in structure.value)
            return str(matcher.grammar_from_lark(f"start: {choices}"))
        case _:
            return str(matcher.grammar_from_lark(structure.text))


def limits() -> object:
    """The limits of a form's compilation."""
    return require("llguidance", "structured", _WHAT).LLParserLimits(**_LIMITS)


def problem_in(structure: Structure) -> str | None:
    """Why no answer can be held to this form, whatever the model; None if one can."""
    matcher = require("llguidance", "structured", _WHAT).LLMatcher
    found = str(matcher.validate_grammar(grammar_of(structure), limits=limits()))
    return None if not found or found.startswith("WARNING") else worded(structure, found)


def worded(structure: Structure, problem: str) -> str:
    """A message of llguidance's, in one line that names the form."""
    return f"the {_NAMES[structure.kind]} cannot be used: {' '.join(problem.split())[:300]}"
