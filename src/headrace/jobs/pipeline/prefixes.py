"""Which prompts begin alike, and the order that puts them beside each other. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_SHARED = 64
"""Shorter common beginnings, in characters, do not count: an engine shares whole pages of 16 tokens or more."""
LEAST_GAIN = 0.02
"""The share of the prompt text that another order must save to be worth it."""
_END = "\0"
"""Ends a role or a message, so that no message is the beginning of another by chance."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much of some prompts' text the prompt before already has at its beginning."""

    as_read: float
    """As a fraction of all text, in the order of the input."""
    sorted: float
    """In the order of `prefix_order`."""
    common: float = 0.0
    """In beginnings of four prompts or more, each counted once: in another window they are read once more."""
    rare: float = 0.0
    """In beginnings of two or three prompts, each counted once."""

    @property
    def gains(self) -> bool:
        """Whether the order of the prefixes is worth it."""
        return self.sorted - self.as_read >= LEAST_GAIN

    def gains_beyond(self, share: float) -> bool:
        """Whether one order of all prompts is worth more than windows; these prompts are a `share` of them.

        In a small sample, a prefix seen two or three times is more common in the whole input: many others of its kind
        occur once here and again elsewhere. The smaller the sample, the more such a prefix says.
        """
        return 0 < share < 1 and (self.common + self.rare / share) * (1 - share) >= LEAST_GAIN


def prompt_text(value: object) -> str:
    """The text that decides which prompts begin alike: of a prompt, a chat, or the body of a request."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        asked = value.get("messages", value.get("prompt", value.get("content")))
        first = "".join(f"{value[name]}{_END}" for name in ("role",) if name in value)
        tools = _as_json(value["tools"]) + _END if value.get("tools") else ""
        return first + tools + (_as_json(value) if asked is None else prompt_text(asked))
    if isinstance(value, (list, tuple)):
        return "".join(f"{prompt_text(item)}{_END}" for item in value)
    return _as_json(value)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return ""


def prefix_order(prompts: Sequence[str]) -> list[int]:
    """The numbers of the prompts in an order in which all that begin alike are neighbours.

    Sorted texts are a walk through their tree of prefixes, so every shared prefix is contiguous, at every level of the
    tree. Groups that share nothing are free to move: the group with the longest prompt goes first.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    groups: list[list[int]] = []
    for number in order:
        if not groups or not _begin_alike(prompts[groups[-1][-1]], prompts[number]):
            groups.append([])
        groups[-1].append(number)
    groups.sort(key=lambda group: -max(len(prompts[number]) for number in group))
    return [number for group in groups for number in group]


def sharing(prompts: Sequence[str], order: Sequence[int]) -> Sharing:
    """What these prompts share with the one before, as they are and in this order."""
    total = sum(map(len, prompts))
    if not total:
        return Sharing(0.0, 0.0)
    lengths = [*_shared([prompts[number] for number in order]), 0, 0]
    opened = {False: 0, True: 0}
    for number, length in enumerate(lengths[:-2]):
        before = lengths[number - 1] if number else 0
        if length - before >= LEAST_SHARED:
            rare = min(lengths[number + 1 : number + 3]) <= length - LEAST_SHARED
            opened[rare] += length - before
    as_read = sum(_shared(prompts))
    return Sharing(as_read / total, sum(lengths) / total, opened[False] / total, opened[True] / total)


def _shared(prompts: Sequence[str]) -> list[int]:
    """The length of the beginning that each prompt shares with the next."""
    return [common_length(one, other) if _begin_alike(one, other) else 0 for one, other in pairwise(prompts)]


def _begin_alike(one: str, other: str) -> bool:
    return len(one) >= LEAST_SHARED and one[:LEAST_SHARED] == other[:LEAST_SHARED]


def common_length(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    high = min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
