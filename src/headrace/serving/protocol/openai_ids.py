"""Token ids of OpenAI's embedding models, which some clients send instead of texts, as texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from headrace.errors import MissingExtraError
from headrace.extras import require
from headrace.serving.errors import ApiError

MODELS = frozenset({"text-embedding-ada-002", "text-embedding-3-small", "text-embedding-3-large"})
"""A request that names one of these, and no other tokenizer, has ids of OpenAI's."""
_ENCODING = "cl100k_base"


def texts_of_ids(ids: Sequence[Sequence[int]]) -> list[str]:
    """The texts. Blocks: the first call reads the vocabulary, which tiktoken downloads and keeps.

    Raises:
        ApiError: 400 for an id that is not of this tokenizer, or if the server cannot read its ids.
    """
    try:
        decode = _decoder()
    except (MissingExtraError, OSError) as error:
        message = (
            f"input holds token ids of OpenAI's tokenizer, which this server cannot read ({error}); send texts, in "
            "LangChain with OpenAIEmbeddings(check_embedding_ctx_length=False)"
        )
        raise ApiError(400, message, code="token_ids", param="input") from error
    try:
        return [decode(one) for one in ids]
    except (KeyError, OverflowError) as error:
        message = f"input holds a token id that OpenAI's tokenizer {_ENCODING} does not have: {error}"
        raise ApiError(400, message, code="token_ids", param="input") from error


@functools.cache
def _decoder() -> Callable[[Sequence[int]], str]:
    tiktoken = require("tiktoken", "tiktoken", "reading them")
    decode: Callable[[Sequence[int]], str] = tiktoken.get_encoding(_ENCODING).decode
    return decode
