"""Several answers to each record: every answer is a part of the record, and the output is their list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from headrace.engines.base import Chunks, Prepared
from headrace.engines.requests.formed import Try
from headrace.errors import RecordError
from headrace.jobs.answer_form import AnswerForm, InvalidAnswerError
from headrace.records import Json

Ask: TypeAlias = Callable[[tuple[Try, ...]], Prepared[object] | Exception]
"""Prepares the record again, after these answers without their form."""


@runtime_checkable
class SampledRequest(Protocol):
    """What `prepare` makes of a request to a language model that can be answered several times."""

    def sample(self, number: int, *, scored: bool) -> object:
        """The same request with other random numbers; number 0 has its own.

        Args:
            number: which of its answers.
            scored: whether the answer must have the log probabilities of its tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """How many answers a record has."""

    n: int
    made: int
    """How many are computed, of which those with the highest mean log probability of a token are kept."""
    form: AnswerForm | None = None
    """The form of each answer, which is asked for again on its own."""

    @classmethod
    def of(cls, n: int, best_of: int | None, form: AnswerForm | None) -> Samples | None:
        """The settings; None for one answer as it comes."""
        return None if n == 1 and best_of in (None, 1) else cls(n, best_of or n, form)

    def prepared(self, request: Prepared[object], ask: Ask) -> Prepared[object] | Exception:
        """The request as its parts.

        Args:
            request: the record's.
            ask: prepares it again.
        """
        if request.greedy:
            return RecordError(
                f"{self.made} answers to a prompt would be equal at temperature 0: raise ``temperature``"
            )
        if self.made > self.n and not isinstance(request.payload, SampledRequest):
            return RecordError("the engine does not say how likely its answers are: leave out ``best_of``")
        numbers = tuple(range(self.made))
        parts = self._parts(numbers, [request] * self.made, {}, {}, ask)
        return Prepared(parts, sum(parts.costs), request.truncated)

    def _parts(
        self,
        numbers: Sequence[int],
        requests: Sequence[Prepared[object]],
        done: Mapping[int, object],
        tries: Mapping[int, tuple[Try, ...]],
        ask: Ask,
    ) -> Chunks[object]:
        """The parts for the answers with these numbers, beside those that are done."""
        payloads = [self._sampled(one.payload, number) for one, number in zip(requests, numbers, strict=True)]
        join = functools.partial(self._join, numbers, done, tries, ask)
        later = None if self.form is None else 0
        return Chunks(payloads, [one.cost for one in requests], [1] * len(payloads), join, later)

    def _sampled(self, payload: object, number: int) -> object:
        if not isinstance(payload, SampledRequest):
            return payload
        return payload.sample(number, scored=self.made > self.n)

    def _join(
        self,
        numbers: Sequence[int],
        done: Mapping[int, object],
        tries: Mapping[int, tuple[Try, ...]],
        ask: Ask,
        outputs: Sequence[object],
        weights: Sequence[int],  # noqa: ARG002
    ) -> object:
        """The record's output, or the answers to ask for again.

        Raises:
            InvalidAnswerError: an answer never got its form.
            RecordError: the engine gives no log probabilities.
        """
        found = dict(done)
        wrong: dict[int, tuple[Try, ...]] = {}
        for number, output in zip(numbers, outputs, strict=True):
            before = tries.get(number, ())
            try:
                found[number] = output if self.form is None else self.form.checked(output)
            except InvalidAnswerError as error:
                if not error.may_pass or self.form is None or len(before) >= self.form.reask:
                    raise InvalidAnswerError(str(error), error.text, may_pass=False, before=before) from None
                wrong[number] = (*before, Try(error.text, str(error)))
        if not wrong:
            return self._chosen([found[number] for number in range(self.made)])
        requests = [ask(one) for one in wrong.values()]
        if refused := next((one for one in requests if isinstance(one, Exception)), None):
            raise refused
        good = [one for one in requests if isinstance(one, Prepared)]
        return self._parts(tuple(wrong), good, found, wrong, ask)

    def _chosen(self, answers: list[object]) -> object:
        if self.made > self.n:
            answers = sorted(answers, key=_likelihood, reverse=True)[: self.n]
            answers = [{name: value for name, value in _fields(one).items() if name != "logprobs"} for one in answers]
        return answers if self.n > 1 else answers[0]


def _fields(answer: object) -> Mapping[str, Json]:
    return answer if isinstance(answer, Mapping) else {}


def _likelihood(answer: object) -> float:
    """The mean log probability of a token of an answer. Raises RecordError: the answer does not say it."""
    given = _fields(answer).get("logprobs")
    if isinstance(given, Mapping):  # as servers have it, for a chat or a completion
        given = given.get("content") or [{"logprob": one} for one in given.get("token_logprobs") or ()]
    if not given:
        raise RecordError("the answer has no log probabilities, which ``best_of`` compares: leave it out")
    return float(sum(token["logprob"] for token in given) / len(given))
