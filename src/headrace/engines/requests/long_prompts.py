"""Prompts that are too long for a language model: split into chunks, whose answers become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeAlias

from headrace.engines.base import Chunks, Placed, Prepared
from headrace.engines.requests.formed import FormedRequest
from headrace.engines.requests.generation import GeneratedText
from headrace.engines.requests.templates import FilledTemplate, filled, template_fields, template_text
from headrace.errors import ConfigError, RecordError
from headrace.wording import shown

ANSWERS = "answers"
"""The field of a reduce template that holds the answers to the chunks."""
_BETWEEN = "\n\n"
"""Separates the answers."""
_CLOSE_ENOUGH = 0.03
"""A chunk may be shorter than its room by this share: each longer try would count tokens once more."""
_GUESSES = 6
"""Tries of a chunk's length before it is found by halving."""
_AT_LINE = 8
"""A chunk ends after a line, else after a word, if one ends in the last eighth of it."""


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """What happens to prompts that are too long for the model, as the options of an engine say.

    Raises:
        ConfigError: a value does not go with another.
    """

    on_too_long: Literal["error", "split"] = "error"
    """Fail the record, or split its longest text into chunks."""
    chunk_overlap: int | None = None
    """Tokens that neighbouring chunks have in common; None for none."""
    chunk_join: Literal["map-reduce", "first"] | None = None
    """Ask about the answers to all chunks once more, or take the first answer; None for "map-reduce"."""
    reduce_template: str | None = None
    """For "map-reduce": that last prompt, with {answers}, and other fields of the prompt template."""
    no_answer: str | None = None
    """For "first": how an answer begins that is none; None if only an empty answer is none."""

    def __post_init__(self) -> None:
        if self.splits:
            self._check_rule()
        else:
            for field in fields(self)[1:]:
                if (value := getattr(self, field.name)) is not None:
                    raise ConfigError(
                        f"``{field.name}`` is {value!r}, but no prompt is split: set ``on_too_long=split``"
                    )

    def _check_rule(self) -> None:
        for name in ("reduce_template", "no_answer"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(f"{name} is {shown(value)}: it must be a text")
        if self.chunk_join == "first":
            if self.reduce_template is not None:
                raise ConfigError(
                    "``reduce_template`` goes with ``chunk_join`` 'map-reduce', not 'first': leave one out"
                )
            return
        if self.no_answer is not None:
            raise ConfigError("``no_answer`` goes with ``chunk_join`` 'first': set that, or leave it out")
        if self.reduce_template is None or ANSWERS not in template_fields(self.reduce_template):
            raise ConfigError(
                "a prompt that is split needs a reduce template with {answers}, the last prompt, such as "
                "``reduce_template='Combine these summaries: {answers}'``; or take the first answer: "
                "``chunk_join=first``"
            )

    @property
    def splits(self) -> bool:
        return self.on_too_long == "split"

    def describe(self) -> dict[str, object]:
        """The settings that affect an answer; empty if no prompt is split."""
        return {field.name: getattr(self, field.name) for field in fields(self)} if self.splits else {}


def splits(options: Mapping[str, object], prompt_template: object) -> bool:
    """Whether the prompts of a template are split.

    Raises:
        ConfigError: the reduce template has a field that the prompt template lacks.
    """
    template = template_text(prompt_template)
    known = {ANSWERS, *(template_fields(template) if template else ())}
    reduce = options.get("reduce_template")
    if reduce is not None and (unknown := [name for name in template_fields(str(reduce)) if name not in known]):
        raise ConfigError(
            f"the reduce template names {unknown[0]!r}; it may have {{{ANSWERS}}} and the fields of ``prompt_template``"
        )
    return options.get("on_too_long") == "split"


def room_of(context: int, answer: int) -> int:
    """Tokens that a prompt may have, so that there is room for an answer, though at most half the context."""
    return context - min(answer, context // 2)


Place: TypeAlias = int | str | None


class PromptTooLongError(RecordError):
    """The prompt leaves no room for an answer in the model's context."""


class PromptEngine(Protocol):
    """What a `PromptSplitter` must know of an engine. All methods raise RecordError for an invalid request."""

    max_model_len: int

    def count(self, request: object) -> int:
        """Tokens of the prompt. May stop counting where it is longer than the model's context."""
        ...

    def whole(self, request: object, place: Place) -> Prepared[object]:
        """The request, not split; `place` is that of `Placed`."""
        ...

    def room(self, request: object) -> int:
        """Tokens that the prompt may have, so that there is room for the answer."""
        ...


def prepared_by(
    inputs: Sequence[object], engine: PromptEngine, splitter: PromptSplitter | None
) -> list[Prepared[object] | Exception]:
    """Each request prepared, whole or split by the splitter; its RecordError if it is invalid."""
    one = engine.whole if splitter is None else splitter.prepare
    prepared: list[Prepared[object] | Exception] = []
    for value in inputs:
        request, place = (value.request, value.place) if isinstance(value, Placed) else (value, None)
        try:
            prepared.append(one(request, place))
        except PromptTooLongError as error:
            prepared.append(_with_form(error, request, engine))
        except RecordError as error:
            prepared.append(error)
    return prepared


def _with_form(error: PromptTooLongError, request: object, engine: PromptEngine) -> RecordError:
    """The error of a prompt that is too long, with the tokens that say the form of its answer."""
    if not isinstance(request, FormedRequest) or not request.words:
        return RecordError(str(error))
    tokens, most = engine.count({"prompt": request.words}), engine.max_model_len
    said = f"{tokens:,}" if tokens <= most else f"more than {most:,}"
    return RecordError(
        f"{error}; {said} of its tokens say the form of the answer ({request.structure.said_in}): shorten the form, or "
        "keep it out of the prompt (``schema_in_prompt=False``)"
    )


@dataclass(frozen=True, slots=True)
class _Used:
    """Tokens of the answers before the last."""

    prompt: int = 0
    completion: int = 0

    def plus(self, answers: Sequence[GeneratedText]) -> _Used:
        return _Used(
            self.prompt + sum(answer["prompt_tokens"] for answer in answers),
            self.completion + sum(answer["completion_tokens"] for answer in answers),
        )

    def added_to(self, answer: GeneratedText) -> GeneratedText:
        total = self.plus([answer])
        return {**answer, "prompt_tokens": total.prompt, "completion_tokens": total.completion}


class PromptSplitter:
    """Prepares requests, and splits the prompts that are too long.

    Args:
        rules: how the answers to the chunks become one.
        engine: counts tokens, and prepares what is short enough.
    """

    def __init__(self, rules: LongPrompts, engine: PromptEngine) -> None:
        self._rules = rules
        self._engine = engine

    def prepare(self, request: object, place: Place) -> Prepared[object]:
        """The request, or its chunks. Raises RecordError: it is invalid, or cannot be split."""
        if self._engine.count(request) <= self._engine.room(request):
            return self._engine.whole(request, place)
        chunks = [self._engine.whole(chunk, place) for chunk in self._chunks(request)]
        if self._rules.chunk_join == "first":
            payload = self._first(chunks, 0, _Used())
        else:
            payload = self._all(request, place, chunks, _Used())
        return Prepared(payload, sum(chunk.cost for chunk in chunks), greedy=all(chunk.greedy for chunk in chunks))

    # -- the first that answers --------------------------------------------------------------------------------------

    def _first(self, chunks: Sequence[Prepared[object]], asked: int, used: _Used) -> Chunks[object]:
        """Asks one chunk after the other until one answers."""

        def join(answers: Sequence[GeneratedText], _: Sequence[int]) -> object:
            if asked + 1 == len(chunks) or self._answers(answers[0]["text"]):
                return used.added_to(answers[0])
            return self._first(chunks, asked + 1, used.plus(answers))

        chunk, later = chunks[asked], len(chunks) - asked - 1
        return Chunks([chunk.payload], [chunk.cost], [1], join, later or None)

    def _answers(self, text: str) -> bool:
        said, none = text.strip().casefold(), self._rules.no_answer
        return bool(said) and not (none is not None and said.startswith(none.strip().casefold()))

    # -- the answers to all ------------------------------------------------------------------------------------------

    def _all(self, request: object, place: Place, chunks: Sequence[Prepared[object]], used: _Used) -> Chunks[object]:
        """Asks all chunks, and then about their answers."""

        def join(answers: Sequence[GeneratedText], _: Sequence[int]) -> object:
            return self._about(request, place, answers, used.plus(answers))

        return Chunks([chunk.payload for chunk in chunks], [chunk.cost for chunk in chunks], [1] * len(chunks), join, 0)

    def _about(self, request: object, place: Place, answers: Sequence[GeneratedText], used: _Used) -> Chunks[object]:
        """Asks about these answers; if they are too long together, about chunks of them first.

        Raises:
            RecordError: the answers do not get fewer.
        """
        last = self._reduced(request, [answer["text"].strip() for answer in answers])
        if self._engine.count(last) <= self._engine.room(last):
            one = self._engine.whole(last, place)
            return Chunks([one.payload], [one.cost], [1], lambda final, _: used.added_to(final[0]))
        chunks = [self._engine.whole(chunk, place) for chunk in self._chunks(last, ANSWERS)]
        if len(chunks) >= len(answers):
            raise RecordError(
                f"the answers to {len(answers)} chunks do not fit in one prompt, and reducing them would take as many: "
                "lower max_tokens, or raise max_model_len"
            )
        return self._all(request, place, chunks, used)

    def _reduced(self, request: object, answers: Sequence[str]) -> object:
        """The request with the reduce template as its prompt."""
        known = request.fields if isinstance(request, FilledTemplate) else {}
        template = self._rules.reduce_template or ""
        if unknown := [name for name in template_fields(template) if name != ANSWERS and name not in known]:
            raise RecordError(f"the reduce template names {unknown[0]!r}, which is no field of the prompt's template")
        asked = FilledTemplate(template, {**known, ANSWERS: _BETWEEN.join(answers)})
        body: Mapping[str, object] = request if isinstance(request, dict) else {}
        messages = body.get("messages", request)
        if not isinstance(messages, list):
            return {**body, "prompt": asked} if body else asked
        chat = [message for message in messages if message.get("role") in ("system", "developer")]
        chat.append({"role": "user", "content": asked})
        return {**body, "messages": chat} if body else chat

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _chunks(self, request: object, field: str | None = None) -> list[object]:
        """The request once for each chunk of its longest text."""
        text, with_text = _longest_text(request, field)
        room = self._engine.room(request)

        def tokens(part: str) -> int:
            return self._engine.count(with_text(part))

        around = tokens(text[:1])
        overlap = self._rules.chunk_overlap or 0
        if around + overlap >= room:
            raise RecordError(
                f"the prompt cannot be split: {around:,} tokens of it must be in each chunk, and {room:,} are the most "
                f"that a prompt may have; chunk_overlap is {overlap}"
            )
        chunks: list[object] = []
        start, size = 0, 4 * (room - around)
        while start < len(text):
            size = _most(lambda length: tokens(text[start : start + length]), room, len(text) - start, size)  # noqa: B023
            end = start + size
            if end < len(text):
                end = _after_word(text, start, end)
            chunks.append(with_text(text[start:end]))
            shared = end - start - 1  # at most, so that each chunk begins after the one before
            if end == len(text) or not (overlap and shared):
                start = end
                continue
            guess = size * overlap // (room - around)
            again = _most(lambda length: tokens(text[end - length : end]), around + overlap, shared, guess)  # noqa: B023
            start = _at_word(text, end - again, end)
        return chunks


def _longest_text(request: object, field: str | None) -> tuple[str, Callable[[str], object]]:
    """The text of a request to split, and the request with another text in its place.

    Raises:
        RecordError: it has none.
    """
    if isinstance(request, FilledTemplate):
        template, values = request.template, request.fields
        name = field or max(template_fields(template), key=lambda name: len(values[name]))
        return values[name], lambda part: filled(template, {**values, name: part})
    if isinstance(request, str):
        return request, lambda part: part
    if isinstance(request, list):
        number = max(range(len(request)), key=lambda number: _length(request[number]), default=0)
        if request and _length(request[number]) > (False, 0):
            message, before, after = request[number], request[:number], request[number + 1 :]
            text, with_text = _longest_text(message["content"], field)
            return text, lambda part: [*before, {**message, "content": with_text(part)}, *after]
    if isinstance(request, dict):
        name = "messages" if "messages" in request else "prompt"
        if isinstance(request[name], (str, list)):
            text, with_text = _longest_text(request[name], field)
            return text, lambda part: {**request, name: with_text(part)}
    raise RecordError("the prompt cannot be split: it has no text, only token ids or parts of other kinds")


def _length(message: object) -> tuple[bool, int]:
    """What decides which message of a chat is split: that about answers, else the longest."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, FilledTemplate), len(content) if isinstance(content, str) else 0


def _most(tokens: Callable[[int], int], room: int, longest: int, guess: int) -> int:
    """About the largest length of a text, at least 1 and at most `longest`, that has at most `room` tokens."""
    low, high = 1, longest + 1
    guess = min(max(guess, 1), longest)
    tries = 0
    while high - low > 1:
        count = tokens(guess)
        if count <= room:
            low = guess
            if guess == longest or room - count <= room * _CLOSE_ENOUGH:
                break
        else:
            high = guess
        tries += 1
        guess = min(max(guess * room // max(count, 1), low + 1), high - 1) if tries < _GUESSES else (low + high) // 2
    return low


def _at_word(text: str, start: int, end: int) -> int:
    """The beginning of the next word, unless a word begins at `start`, or none does before `end`."""
    found = text.find(" ", start, end - 1)
    return start if text[start - 1].isspace() or found < 0 else found + 1


def _after_word(text: str, start: int, end: int) -> int:
    """The end of the last line, else of the last word, in the last part of a chunk; its own end if there is none."""
    least = end - (end - start) // _AT_LINE
    for mark in ("\n", " "):
        if (found := text.rfind(mark, least, end)) >= 0:
            return found + 1
    return end
