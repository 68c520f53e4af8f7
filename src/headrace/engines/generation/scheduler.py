"""Chooses what each step computes, with pages of the key-value cache that requests share. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.device.step_sizes import StepSize
from headrace.engines.capabilities import PrefixCacheStats
from headrace.engines.generation.prefix_cache import PrefixCache

_VOCABULARY = 1 << 20
"""More tokens than any model knows."""
_FEW = 16
"""Prompts wait while there are more than this many times as many answers."""


@dataclass(slots=True, eq=False)
class AnswerTokens:
    """The tokens of a request, and how many of them are computed."""

    key: int
    prompt: Sequence[int]
    generated: list[int]
    computed: int = 0
    """The first tokens, whose keys and values are stored."""
    cached: int | None = None
    """Tokens of the prompt that the prefix cache held when it began; None before."""
    variant: int = 0
    """The number of the adapter that computes its keys and values; 0 for none."""

    @property
    def count(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def decodes(self) -> bool:
        """Whether only the token that was chosen last, and those that had to follow, are not computed."""
        return bool(self.generated) and self.computed >= len(self.prompt)

    def between(self, start: int, end: int) -> list[int]:
        """The tokens from `start` to `end`."""
        offset = len(self.prompt)
        if start >= offset:
            return self.generated[start - offset : end - offset]
        return [*self.prompt[start:end], *self.generated[: max(end - offset, 0)]]

    def opening(self, count: int) -> Sequence[int]:
        """The first tokens, as the prefix cache knows them: those of another adapter begin otherwise."""
        if count <= len(self.prompt) and not self.variant:
            return self.prompt[:count]  # no copy of a whole tuple: each step asks for every prompt that waits
        found = self.between(0, count)
        return [found[0] - self.variant * _VOCABULARY, *found[1:]] if found and self.variant else found


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The part of a request that a step computes."""

    tokens: AnswerTokens
    length: int
    """The number of tokens that the step computes."""

    @property
    def chooses(self) -> bool:
        """Whether its next token follows."""
        return self.tokens.computed + self.length == self.tokens.count


@dataclass(slots=True)
class PageScheduler:
    """Schedules requests first come, first served; answers come before prompts.

    A prompt waits while another request computes its next page. If no page is left, the newest request gives its pages
    back and starts again later; the batcher's budget makes that rare.
    """

    pages: PrefixCache
    stats: PrefixCacheStats
    """Counts of tokens so far."""
    apart: int = 0
    """Steps that only continue answers, at most, while a few prompts wait, where such steps are cheaper."""
    _continued: int = 0
    """Such steps since the last one that read a prompt."""
    _active: dict[int, AnswerTokens] = field(default_factory=dict)
    _waiting: dict[int, AnswerTokens] = field(default_factory=dict)

    def add(self, tokens: AnswerTokens) -> None:
        """Add a request."""
        self._waiting[tokens.key] = tokens

    def remove(self, key: int) -> None:
        """Forget a request; one that is not known is ignored."""
        self._waiting.pop(key, None)
        self._active.pop(key, None)
        self.pages.release(key)

    def plan(self, most: StepSize) -> list[PlannedPart]:
        """What the next step computes."""
        parts: list[PlannedPart] = []
        left = most.tokens
        active = list(self._active.values())
        decoding, reading = [one for one in active if one.decodes], [one for one in active if not one.decodes]
        waits = self._prompts_wait(len(decoding), len(reading) + len(self._waiting))
        begun = decoding if waits else [*decoding, *reading]
        for tokens in (*begun, *([] if waits else list(self._waiting.values()))):
            if left <= 0 or len(parts) == most.answers:
                break
            if tokens.key not in self._active and (tokens in begun or not self._start(tokens)):
                continue  # it has lost its pages in this step, or another request computes a part of its prompt
            length = min(tokens.count - tokens.computed, left)
            if self._take_pages(tokens, tokens.computed + length, parts):
                parts.append(PlannedPart(tokens, length))
                left -= length
        return parts

    def _prompts_wait(self, answers: int, prompts: int) -> bool:
        """Whether the next step only continues answers, though prompts could be read."""
        if not prompts or prompts * _FEW > answers or self._continued >= self.apart:
            self._continued = 0
            return False
        self._continued += 1
        return True

    def _start(self, tokens: AnswerTokens) -> bool:
        """Make a waiting request active, unless another one computes a part of its prompt."""
        found = self.pages.start(tokens.key, tokens.opening(tokens.count))
        if found is None:
            return False
        self.stats = replace(self.stats, queries=self.stats.queries + tokens.count, hits=self.stats.hits + found)
        tokens.computed = found
        if tokens.cached is None:  # it may begin again, with its own pages
            tokens.cached = found
        self._active[tokens.key] = self._waiting.pop(tokens.key)
        return True

    def _take_pages(self, tokens: AnswerTokens, count: int, parts: Sequence[PlannedPart]) -> bool:
        """Give a request pages for `count` tokens, at the cost of newer requests that are not in this step."""
        while not self.pages.grow(tokens.key, count):
            planned = {part.tokens.key for part in parts}
            newest = next(key for key in reversed(self._active) if key not in planned)
            if newest == tokens.key:
                return False
            again = self._active.pop(newest)
            self.pages.release(newest)
            again.computed = 0
            self._waiting = {newest: again, **self._waiting}
        return True

    def done(self, parts: Sequence[PlannedPart], took_s: float) -> tuple[int, int]:
        """A step was computed: its full pages can be shared. Each token took an equal part of its time.

        Returns how many answers it continued, and how many tokens of prompts it read.
        """
        prompts = generated = 0
        total = sum(part.length for part in parts)
        for part in parts:
            tokens = part.tokens
            prompts += 0 if tokens.decodes else part.length
            generated += part.length if tokens.decodes else part.chooses
            tokens.computed += part.length
            if self.pages.completes(tokens.key, tokens.computed):
                self.pages.computed(tokens.key, tokens.opening(tokens.computed), tokens.computed)
        stats = self.stats
        self.stats = replace(
            stats,
            computed=stats.computed + prompts,
            generated=stats.generated + generated,
            computed_s=(stats.computed_s or 0.0) + took_s * prompts / max(total, 1),
        )
        return total - prompts, prompts

    def shared(self, key: int) -> int:
        """Tokens of a request in pages that others hold, and held first."""
        waiting = self._waiting.get(key)
        return self.pages.shared(key) if waiting is None else self.pages.held(waiting.opening(waiting.count))
