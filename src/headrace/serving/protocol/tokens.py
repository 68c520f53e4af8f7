"""Requests and responses of /tokenize and /detokenize, in the format of vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, FailFast, Field

from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import RequestFields


class TokenizeRequest(RequestFields):
    """POST /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[JsonObject] | None, Field(min_length=1, fail_fast=True)] = None
    add_special_tokens: Annotated[bool | None, Field(description="Default: true for a prompt, false for a chat.")] = (
        None
    )
    return_token_strs: bool | None = None

    def value(self) -> str | list[JsonObject]:
        """The prompt or the messages. Raises ApiError: 400 for both or neither."""
        given = self.prompt if self.messages is None else self.messages
        if given is None or (self.prompt is not None and self.messages is not None):
            raise ApiError(400, "give either prompt or messages", code="missing", param="prompt")
        return given

    @property
    def special(self) -> bool:
        """Whether to add special tokens. A chat template writes them itself."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class Tokenized(BaseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str
