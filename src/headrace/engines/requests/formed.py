"""Requests of a job whose answers have a form: what the prompt says of it, and earlier answers that lacked it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.engines.requests.structure import Structure
from headrace.errors import RecordError
from headrace.records import Json


class Try(NamedTuple):
    """An answer that does not have its form."""

    text: str
    error: str

    @property
    def correction(self) -> str:
        return f"This answer is not valid: {self.error}. Answer again, with nothing else."


class FormedRequest(NamedTuple):
    """A request with the form of its answer, as an engine gets it that says `holds_forms` in its profile."""

    value: object
    """A text, a chat or a request body."""
    structure: Structure
    words: str
    """What the prompt says of the form before all else; empty for nothing."""
    tries: tuple[Try, ...] = ()

    def in_prompt(self, prompt: str) -> str:
        """The prompt with the words before it, and the earlier answers after it."""
        tries = (f"{one.text}\n\n{one.correction}\n\n" for one in self.tries)
        return "".join((self.words, "\n\n" if self.words else "", prompt, *tries))

    def in_chat(self, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """The messages with the words before the user's first text, and the earlier answers after them."""
        chat = [dict(message) for message in messages]
        asked = next((message for message in chat if message.get("role") == "user"), None)
        if asked is not None and self.words:
            content = asked.get("content")
            parts = [{"type": "text", "text": self.words}, *content] if isinstance(content, list) else None
            asked["content"] = parts or f"{self.words}\n\n{content or ''}"
        for one in self.tries:
            chat.append({"role": "assistant", "content": one.text})
            chat.append({"role": "user", "content": one.correction})
        return list(chat)

    def spoken(self) -> object:
        """The request for an engine that cannot hold an answer to a form: its words alone.

        Raises:
            RecordError: the prompt is no text.
        """
        value: Json = self.value
        if isinstance(value, str):
            return self.in_prompt(value)
        if isinstance(value, list):
            return self.in_chat(value)
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            return {**value, "messages": self.in_chat(value["messages"])}
        if isinstance(value, dict) and isinstance(value.get("prompt"), str):
            return {**value, "prompt": self.in_prompt(value["prompt"])}
        raise RecordError("the prompt is no text, so it cannot say which form the answer must have")
