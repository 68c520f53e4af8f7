"""The lines of a batch as an engine takes them: each body is checked as the same request is that comes over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headrace.engines.base import Engine, Prepared
from headrace.errors import RecordError
from headrace.io.openai import COMPLETIONS, EMBEDDINGS, Answers
from headrace.serving.errors import ApiError, invalid
from headrace.serving.host import Host, chars_in
from headrace.serving.replies import as_base64
from headrace.serving.schemas import ChatRequest, CompletionRequest, EmbeddingRequest


@dataclass(frozen=True, slots=True)
class Line:
    """What the engine is to do for one line: once for each of its inputs."""

    parts: Sequence[Prepared[Any]]
    spell: Callable[[Any], Any] | None = None
    """How each output is written; None leaves it as it is."""

    def answers(self, outputs: Sequence[Any]) -> Answers:
        """The line's output."""
        return Answers(outputs if self.spell is None else map(self.spell, outputs))


class Lines:
    """An engine whose records are the bodies of requests, for `url`; it runs nothing itself.

    Args:
        engine: the server's, which is not closed with this.
        url: what all lines ask.
        host: knows what a request may have.
    """

    def __init__(self, engine: Engine[Any, Any], url: str, host: Host) -> None:
        self._engine = engine
        self._host = host
        self._read = {EMBEDDINGS: self._embedding, COMPLETIONS: self._completion}.get(url, self._chat)
        self.counts_tokens = getattr(engine, "counts_tokens", True)

    def describe(self) -> Mapping[str, Any]:
        """The engine's own description."""
        return self._engine.describe()

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Line] | Exception]:
        """A `Line` for each body, or what is wrong with it."""
        return [self._prepare(body) for body in inputs]

    def close(self) -> None:
        """Nothing: the server closes its engine."""

    def _prepare(self, body: Any) -> Prepared[Line] | Exception:
        try:
            values, spell = self._read(body)
        except ValidationError as error:
            return RecordError(invalid(error).detail)
        except ApiError as error:
            return RecordError(error.detail)
        parts: list[Prepared[Any]] = []
        for part in self._engine.prepare(values):
            if isinstance(part, Exception):
                return part
            parts.append(part)
        return Prepared(Line(parts, spell), sum(part.cost for part in parts), any(part.truncated for part in parts))

    def _embedding(self, body: Any) -> tuple[list[Any], Callable[[Any], Any] | None]:
        asked = EmbeddingRequest.model_validate(body)
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        self._host.check_texts(texts, "input")
        return texts, as_base64 if asked.encoding_format == "base64" else None

    def _completion(self, body: Any) -> tuple[list[Any], None]:
        asked = CompletionRequest.model_validate(body)
        _refuse_stream(asked)
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        self._host.check_texts(prompts, "prompt")
        return [asked.asked(prompt=prompt) for prompt in prompts], None

    def _chat(self, body: Any) -> tuple[list[Any], None]:
        asked = ChatRequest.model_validate(body)
        _refuse_stream(asked)
        self._host.check_length(chars_in(asked.messages), "messages")
        return [asked.asked(messages=asked.messages)], None


def _refuse_stream(asked: CompletionRequest | ChatRequest) -> None:
    if asked.stream:
        raise ApiError(400, "stream is true: the answers of a batch are whole", code="bad_stream", param="stream")
