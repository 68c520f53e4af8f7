"""Log probabilities of generated tokens: what a request asks for, and OpenAI's format of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.engines.generation.sampling import TokenLogprob
from headrace.engines.requests.generation import Chance, Request, TokenChance
from headrace.errors import RecordError
from headrace.wording import shown

FIELDS = ("logprobs", "top_logprobs")
MOST = 20
"""Maximum alternatives to each token, as in OpenAI's API."""
_BEFORE = 8
"""Tokens before a token that may change its text, such as the other bytes of a character."""

Decode = Callable[[Sequence[int]], str]


def wanted(request: Request) -> int | None:
    """How many alternatives to each token the request asks for; None for no log probabilities.

    A chat has `logprobs: true` and `top_logprobs`, a completion has `logprobs: 5`.

    Raises:
        RecordError: a field has another type, or is out of range.
    """
    given, top = request.extra.get("logprobs"), request.extra.get("top_logprobs")
    if request.messages is None:
        if top is not None:
            raise RecordError("top_logprobs belongs to chats; a completion takes logprobs: 5", param="top_logprobs")
        if given is not None and given is not False and not _is_count(given):
            raise RecordError(f"logprobs is {shown(given)}: it must be an int from 0 to {MOST}", param="logprobs")
        return given if isinstance(given, int) and given is not False else None
    if given is not None and not isinstance(given, bool):
        raise RecordError(f"logprobs is {shown(given)}: for a chat it must be true or false", param="logprobs")
    if top is not None and (not _is_count(top) or not given):
        raise RecordError(
            f"top_logprobs is {shown(top)}: it must be an int from 0 to {MOST}, with logprobs: true",
            param="top_logprobs",
        )
    return int(str(top or 0)) if given else None


def written(found: Sequence[TokenLogprob], decode: Decode, end: int | None) -> list[TokenChance]:
    """The tokens as in the message of a chat.

    Args:
        decode: makes text of tokens.
        end: length of the text, if a stop string has ended it.
    """
    ids = [one.token for one in found]
    listed: list[TokenChance] = []
    length = 0
    for place, one in enumerate(found):
        if end is not None and length >= end:
            break
        before = ids[max(0, place - _BEFORE) : place]
        chance = _chance(before, one.token, one.logprob, decode)
        top = [_chance(before, token, logprob, decode) for token, logprob in one.top]
        listed.append(TokenChance(**chance, top_logprobs=top))
        length += len(chance["token"])
    return listed


def _chance(before: Sequence[int], token: int, logprob: float, decode: Decode) -> Chance:
    known = decode(before).rstrip("\ufffd")  # bytes of an incomplete character
    text = decode([*before, token])[len(known) :]
    return Chance(token=text, logprob=logprob, bytes=None if "\ufffd" in text else list(text.encode()))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST
