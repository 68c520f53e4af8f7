"""Token ids of a tokenizer: checked, and converted to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from headrace.engines.base import PreparedRecords
from headrace.engines.capabilities import TOKEN_SPANS, TokenizingEngine, TokenSpans
from headrace.errors import RecordError


class Tokenization(TokenizingEngine, Protocol):
    """What turns the records of an engine into tokens."""

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords: ...


class TokenizedEngine:
    """An engine that leaves its records to `tokens`; it is a `TokenizingEngine`."""

    tokens: Tokenization

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords:
        return self.tokens.prepare(inputs)

    def tokenize(self, value: object, add_special_tokens: bool) -> list[int]:
        return self.tokens.tokenize(value, add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokens.detokenize(ids, skip_special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return self.tokens.token_strings(ids)

    @property
    def token_spans(self) -> TokenSpans | None:
        """Tells where the tokens of a text are; None if that is not known."""
        return TOKEN_SPANS.of(self.tokens)


class Vocabulary:
    """The methods of a tokenization that only read its tokenizer's vocabulary."""

    _tokenizer: Tokenizer

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.token_strings(ids)
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return token_strings(self._tokenizer, ids)


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], param: str | None = None) -> None:
    """Check that the tokenizer knows each id. Raises RecordError: there is no id, or one is not in the vocabulary."""
    if not ids:
        raise RecordError("the list of token ids is empty", param=param)
    token_strings(tokenizer, ids, param)


def token_strings(tokenizer: Tokenizer, ids: Sequence[int], param: str | None = None) -> list[str]:
    """The vocabulary's entry for each id. Raises RecordError: an id is not in the vocabulary."""
    strings: list[str] = []
    for one in ids:
        string = tokenizer.id_to_token(one) if 0 <= one < 1 << 32 else None
        if string is None:
            size = tokenizer.get_vocab_size(with_added_tokens=True)
            raise RecordError(
                f"the token id {one} is not in the model's vocabulary of {size:,}; the ids must be of the model's own "
                "tokenizer",
                param=param,
            )
        strings.append(string)
    return strings
