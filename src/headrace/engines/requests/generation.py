"""Requests for texts with OpenAI's and vLLM's field names: a prompt or chat, and sampling parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NotRequired, TypedDict

from headrace.engines.requests.chat import TEXT_ONLY, checked_messages, with_more
from headrace.engines.requests.formed import FormedRequest
from headrace.engines.requests.structure import FIELDS, Structure, structure_in
from headrace.engines.requests.tools import FIELDS as TOOL_FIELDS
from headrace.engines.requests.tools import ToolUse, tools_in
from headrace.errors import ConfigError, RecordError, misspelt, nearest
from headrace.records import kind_of
from headrace.wording import shown

# Fields of an OpenAI request body that never change an answer.
_IGNORED = frozenset({
    "model", "user", "safety_identifier", "metadata", "service_tier", "stream_options", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
})  # fmt: skip
# Fields that are accepted only if null or one of these values, which do not change an answer.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


class Chance(TypedDict):
    """The log probability of a token."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The bytes of the token's text; None if it is part of a character."""


class TokenChance(Chance):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[Chance]


class GeneratedText(TypedDict):
    """The answer to one request."""

    text: str
    """Without the stop string."""
    finish_reason: str
    """"stop" (an end token or a stop string), "tool_calls" (likewise, with calls) or "length" (`max_tokens`, or the end
    of the context)."""
    prompt_tokens: int
    completion_tokens: int
    """The end token included."""
    cached_tokens: NotRequired[int]
    """Tokens of the prompt that the prefix cache held, if the caller asks for them: they depend on earlier requests."""
    logprobs: NotRequired[list[TokenChance]]
    """The log probabilities of each token of the text, if the request asks for them."""
    reasoning: NotRequired[str]
    """What the model wrote before the text, where it is known to reason."""
    tool_calls: NotRequired[list[object]]
    """The tools that the model calls, as OpenAI's API has them; there if the request has tools."""
    tool_errors: NotRequired[list[str]]
    """What is wrong with the calls, such as an unknown tool; there if the request has tools."""
    choices: NotRequired[list[object]]
    """All answers of a server, if the request asks for several (`n`); the text is that of the first."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, named and defined as in vLLM's `SamplingParams`."""

    max_tokens: int = 256
    min_tokens: int = 0
    """Minimum tokens before an end token or a stop string ends the answer."""
    temperature: float = 0.0
    """0 for greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0 (or -1) for all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """None to derive one from the engine's seed, the place of the request and the prompt: see `derived_seed`."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request: one of `prompt`, `messages` and `token_ids` is set."""

    prompt: str | None
    messages: Sequence[Mapping[str, object]] | None
    sampling: Sampling
    extra: Mapping[str, object]
    """Engine-specific fields of the request body, such as vLLM's `bad_words`."""
    token_ids: tuple[int, ...] | None = None
    """A prompt as ids of the model's own tokenizer."""
    structure: Structure | None = None
    """The form that the answer must have."""
    tools: ToolUse | None = None
    """The tools that the answer may call."""
    adapter: str | None = None
    """The name of the adapter that answers."""


def sampling_from(given: Mapping[str, Any], defaults: Sampling = Sampling()) -> Sampling:
    """`defaults` updated with the given values; None means not given.

    Raises:
        RecordError: a value has the wrong type or is out of range.
    """
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        check, allowed = _CHECKS[name]
        if name == "stop" and isinstance(value, str):
            value = (value,)
        if not check(value):
            raise RecordError(f"{name} is {shown(value)}: it must be {allowed}", param=name)
        changes[name] = tuple(value) if name == "stop" else max(value, 0) if name == "top_k" else value
    sampling = replace(defaults, **changes)
    if sampling.min_tokens > sampling.max_tokens:
        raise RecordError(
            f"min_tokens is {sampling.min_tokens}: it must be <= max_tokens, {sampling.max_tokens}", param="min_tokens"
        )
    return sampling


def nth_seed(seed: int | None, number: int) -> int | None:
    """The seed of an answer with this number, of several to a request with this seed."""
    return None if seed is None else (seed + number) % (1 << 63)


def default_sampling(given: Mapping[str, object]) -> Sampling:
    """Like `sampling_from`, for the options of an engine.

    Raises:
        ConfigError: one has the wrong type or is out of range.
    """
    try:
        return sampling_from(given)
    except RecordError as error:
        raise ConfigError(str(error).replace(f"{error.param}", f"``{error.param}``", 1)) from error


def meaningful(body: Mapping[str, object]) -> dict[str, object]:
    """A request body without ignored fields and without fields that have a neutral value."""
    return {name: value for name, value in body.items() if value is not None and not _is_neutral(name, value)}


def _is_neutral(name: str, value: object) -> bool:
    # Compare types too: for OpenAI, `logprobs: 0` is not `false`.
    return name in _IGNORED or any(
        type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())
    )


def parse(  # noqa: PLR0913 - keyword-only; each engine sets those that concern it
    value: object,
    defaults: Sampling,
    *,
    system_prompt: str | None = None,
    chat: bool = False,
    extra: Collection[str] = (),
    parts: Collection[str] = TEXT_ONLY,
    token_ids: bool = False,
    structures: Collection[str] | None = None,
    tools: ToolUse | None = None,
    examples: Sequence[Mapping[str, object]] = (),
    adapters: Collection[str] = (),
) -> Request:
    """Parse the value of a record.

    A string is a prompt, or the user's message if one of `chat`, `system_prompt`, `tools` and `examples` is set. A list
    is the messages of a chat.
    An object is an OpenAI request body: `prompt` (never a chat) or `messages`, and sampling parameters. `extra` names
    further fields that the engine takes; `parts` names the content part types that the model takes; `token_ids` says
    that the prompt of a body may be a list of token ids; `structures` says that the engine holds an answer to its
    form, and names further fields of `structured_outputs`. `tools` are those of a chat without its own; `examples` are
    messages before its own, after the system's. `adapters` are those that a body may name.

    Raises:
        RecordError: another type, an empty prompt, an unknown role or field, or a parameter out of range. Its `param`
            names the field of the request body.
    """
    form = value if isinstance(value, FormedRequest) else None
    value = value if form is None else form.value
    body: Mapping[str, object] = value if isinstance(value, dict) else {}
    if body:
        value = asked_in(body, token_ids=token_ids)
    sampling = sampling_from(_sampling_in(body), defaults)
    more = ("adapter",) if adapters else ()
    _refuse_unknown(body, (*extra, *more, *TOOL_FIELDS, *(() if structures is None else FIELDS)))
    structure = _structure(body, structures, sampling)
    known = {name: body[name] for name in extra if body.get(name) is not None}
    asked = Request(None, None, sampling, known, structure=structure, adapter=_adapter(body, adapters))
    if isinstance(value, tuple):
        asked = replace(asked, token_ids=value)
    elif value == "":
        raise RecordError("the prompt is empty; there is nothing to answer", param="prompt" if body else None)
    # The field name of a body decides between prompt and chat.
    elif isinstance(value, str) and (body or not any((chat, system_prompt, tools, examples))):
        _refuse_tools(body)
        asked = replace(asked, prompt=value)
    else:
        messages = with_more(_messages(value, parts), system_prompt, examples)
        asked = replace(asked, messages=messages, tools=_tools(body, tools, structure))
    return asked if form is None else _formed(form, asked)


def _structure(body: Mapping[str, object], options: Collection[str] | None, sampling: Sampling) -> Structure | None:
    """The form that a body says, if the engine holds answers to forms."""
    structure = None if options is None else structure_in(body, options)
    if structure is not None:
        _check_ends(sampling)
    return structure


def _messages(value: object, parts: Collection[str]) -> Sequence[Mapping[str, object]]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif not isinstance(value, list):
        raise RecordError(f"the prompt is {kind_of(value)}; it must be text, a list of messages or a request body")
    return checked_messages(value, parts)


def _tools(body: Mapping[str, object], default: ToolUse | None, structure: Structure | None) -> ToolUse | None:
    """The tools of a chat.

    Raises:
        RecordError: they are invalid, or one must be called although the answer has another form.
    """
    use = tools_in(body, default)
    if use is not None and use.forced and structure is not None:
        raise RecordError(
            f"tool_choice says that the answer calls a tool, and {structure.said_in} that it has another form: give "
            "one of them",
            param="tool_choice",
        )
    return use


def _refuse_tools(body: Mapping[str, object]) -> None:
    """Refuse tools of a prompt, which no template writes into it."""
    if body.get("tools"):
        raise RecordError("tools go with messages, not with a prompt: send a chat", param="tools")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RecordError("tool_choice goes with messages and tools: send a chat", param="tool_choice")


def _formed(asked: FormedRequest, request: Request) -> Request:
    """The request with the form that the job gives its answer, and what the prompt says of it."""
    _check_ends(request.sampling)
    if request.structure is not None:
        name = request.structure.said_in
        raise RecordError(f"the record says the form of its answer ({name}), as the job does: give one", param=name)
    if request.prompt is not None:
        return replace(request, prompt=asked.in_prompt(request.prompt), structure=asked.structure)
    if request.messages is not None:
        return replace(request, messages=asked.in_chat(request.messages), structure=asked.structure)
    if asked.words or asked.tries:
        raise RecordError(
            "the prompt is token ids, which cannot say the form of the answer: pass ``schema_in_prompt=False`` and "
            "``reask=0``"
        )
    return replace(request, structure=asked.structure)


def _check_ends(sampling: Sampling) -> None:
    """Refuse what would continue an answer beyond its form."""
    for name, given in (("min_tokens", sampling.min_tokens), ("ignore_eos", sampling.ignore_eos)):
        if given:
            raise RecordError(
                f"{name} is {shown(given)}, and the answer has a form, which says where it ends: give one of them",
                param=name,
            )


def asked_in(body: Mapping[str, object], *, token_ids: bool) -> object:
    """The prompt or the messages of a request body; token ids as a tuple.

    Raises:
        RecordError: it has neither or both, or of another type.
    """
    if ("prompt" in body) == ("messages" in body):
        asked = ("prompt", "messages")
        unknown = "" if "prompt" in body else misspelt(body, asked)
        raise RecordError(f'a request body must have either "prompt" or "messages"{unknown}')
    ids = body.get("prompt")
    if token_ids and isinstance(ids, list) and ids and all(type(one) is int for one in ids):
        return tuple(ids)
    if "prompt" in body and not isinstance(body["prompt"], str):
        raise RecordError(f'"prompt" is of type {type(body["prompt"]).__name__}; one text per record', param="prompt")
    if "messages" in body and not isinstance(body["messages"], list):
        raise RecordError(f'"messages" is of type {type(body["messages"]).__name__}, not a list', param="messages")
    return body["prompt"] if "prompt" in body else body["messages"]


def _sampling_in(body: Mapping[str, object]) -> dict[str, object]:
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    newer = body.get("max_completion_tokens")
    if newer is not None and given.setdefault("max_tokens", newer) != newer:
        raise RecordError(
            f"max_tokens is {shown(given['max_tokens'])} and max_completion_tokens {shown(newer)}: give one of them",
            param="max_completion_tokens",
        )
    return given


def _refuse_unknown(body: Mapping[str, object], extra: Collection[str]) -> None:
    for name, value in meaningful(body).items():
        if name in (*SAMPLING, *extra, "prompt", "messages", "max_completion_tokens"):
            continue
        if name not in _NEUTRAL:
            known = ("prompt", "messages", *SAMPLING, *extra)
            meant = nearest(name[:60], known)
            raise RecordError(f"unknown field {shown(name)}; known: {', '.join(known)}{meant}", param=name)
        takes = f"takes only {' or '.join(map(repr, _NEUTRAL[name]))}" if _NEUTRAL[name] else "does not take it"
        job = "; ``n`` of the job gives each of its prompts several answers, except in a batch file"
        raise RecordError(f"{name} is {shown(value)}: this engine {takes}{job if name == 'n' else ''}", param=name)


def _adapter(body: Mapping[str, Any], known: Collection[str]) -> str | None:
    """The adapter that a body names, in its own field or as its model.

    Raises:
        RecordError: the engine has none of this name, or the body names two.
    """
    model, given = body.get("model"), body.get("adapter")
    named = model if isinstance(model, str) and model in known else None
    if given is None or not known:
        return named
    if given not in list(known):
        raise RecordError(f"adapter is {shown(given)}: the engine has {', '.join(known)}", param="adapter")
    if named not in (None, given):
        raise RecordError(f"adapter is {shown(given)}, and model names another, {named!r}: give one", param="adapter")
    return str(given)


def biases(given: object) -> dict[int, float]:
    """The biases by token id; in JSON the ids are text."""
    if isinstance(given, Mapping) and all(type(bias) in (int, float) for bias in given.values()):
        try:
            return {int(token): bias for token, bias in given.items()}
        except (TypeError, ValueError):
            pass
    raise RecordError(
        f'logit_bias is {shown(given)}: it must be an object of token ids and numbers, such as {{"42": -5}}',
        param="logit_bias",
    )


def derived_seed(engine_seed: int, place: int | str | None, prompt: Sequence[int]) -> int:
    """The seed of a request without its own; `place` is that of `headrace.engines.base.Placed`, if it is known."""
    where = "" if place is None else f"{place}:"
    text = f"{engine_seed}:{where}{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _is_whole(minimum: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and value >= minimum


def _is_number(low: float, high: float, *, above: bool = False) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and value <= high

    return check


def _is_stop(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) and text for text in value)


_CHECKS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "max_tokens": (_is_whole(1), "an int >= 1"),
    "min_tokens": (_is_whole(0), "an int >= 0"),
    "temperature": (_is_number(0, 100), "a number between 0 and 100"),
    "top_p": (_is_number(0, 1, above=True), "a number > 0 and <= 1"),
    "top_k": (_is_whole(-1), "an int >= 1, or 0 for all"),
    "min_p": (_is_number(0, 1), "a number between 0 and 1"),
    "repetition_penalty": (_is_number(0, 10, above=True), "a number > 0 and <= 10"),
    "presence_penalty": (_is_number(-2, 2), "a number between -2 and 2"),
    "frequency_penalty": (_is_number(-2, 2), "a number between -2 and 2"),
    "stop": (_is_stop, "a string or a list of strings, none empty"),
    "seed": (lambda value: type(value) is int and 0 <= value < 1 << 63, "an int between 0 and 2**63 - 1"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
}
SAMPLING = tuple(field.name for field in fields(Sampling))
"""Names of the sampling parameters."""
