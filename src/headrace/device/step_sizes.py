"""Learns how many answers and tokens a step of a language model may have, from a job's own steps. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.device.budget import BudgetTuner

_LEAST = 4
"""How many times smaller than at first each may become."""
_JOB = 4
"""A job begins with this multiple of the first size, which must also suit requests of a server."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step may have at most."""

    answers: int
    """Answers that go on, and prompts."""
    tokens: int
    """Tokens, those of prompts included."""


class StepTuner:
    """Compares sizes of steps by taking both in turn, which changes no answer and computes nothing twice.

    Steps that mostly lengthen answers tell how many answers suit the model, and those that mostly read prompts how many
    tokens.

    Args:
        start: the first size, which stays until `begin`.
        most: the largest size; a part of it that equals the first one's is not tried.
    """

    def __init__(self, start: StepSize, most: StepSize) -> None:
        self._start, self._most = start, most
        self._answers = _fixed(start.answers)
        self._tokens = _fixed(start.tokens)
        self._continued = 0
        """Answers of the last step."""

    def begin(self, kept: StepSize | None) -> None:
        """Use a job's sizes from now on and try others, first the one that an earlier job kept."""
        start, most = self._start, self._most
        answers, tokens = (None, None) if kept is None else (kept.answers, kept.tokens)
        if most.answers > start.answers:
            self._answers = BudgetTuner(_JOB * start.answers, start.answers / _LEAST, most.answers, answers)
        if most.tokens > start.tokens:
            self._tokens = BudgetTuner(_JOB * start.tokens, start.tokens / _LEAST, most.tokens, tokens)

    @property
    def choices(self) -> tuple[list[int], list[int]]:
        """The numbers of answers, and of tokens, that it may choose among."""
        start, most = self._start, self._most
        return _doubled(start.answers, most.answers), _doubled(start.tokens, most.tokens)

    @property
    def next(self) -> StepSize:
        tokens = self._tokens.budget
        if tokens < 2 * self._continued:  # no step could mostly read prompts: such a trial would never end
            tokens = self._tokens.best
        return _size(self._answers.budget, tokens)

    @property
    def best(self) -> StepSize:
        return _size(self._answers.best, self._tokens.best)

    @property
    def slots(self) -> int:
        """Answers that the next steps may have among them."""
        return int(self._answers.largest)

    @property
    def has_compared(self) -> bool:
        """Whether `best` is more than a guess."""
        return self._answers.has_compared or self._tokens.has_compared

    def ran(self, answers: int, prompts: int, seconds: float) -> None:
        """Count a step that chose tokens for `answers` answers and read `prompts` tokens of prompts."""
        self._continued, tokens = answers, answers + prompts
        if prompts < answers:
            self._answers.ran(answers, tokens, seconds)
        else:
            self._tokens.ran(tokens, tokens, seconds)

    def out_of_memory(self) -> None:
        """The last step did not fit: never take one as large."""
        size = self.next
        self._answers.limit(size.answers / 2)
        self._tokens.limit(size.tokens / 2)


def _fixed(value: int) -> BudgetTuner:
    return BudgetTuner(value, value, value)


def _doubled(start: int, most: int) -> list[int]:
    least = start if most == start else max(start // _LEAST, 1)
    return [least << power for power in range((most // least).bit_length())]


def _size(answers: float, tokens: float) -> StepSize:
    return StepSize(int(answers), max(int(tokens), int(answers)))
