"""Token ids of a tokenizer: checked, and converted to text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from headrace.errors import RecordError


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], param: str | None = None) -> None:
    """Check that the tokenizer knows each id.

    Raises:
        RecordError: there is no id, or one is not in the vocabulary.
    """
    if not ids:
        raise RecordError("the list of token ids is empty", param=param)
    token_strings(tokenizer, ids, param)


def token_strings(tokenizer: Tokenizer, ids: Sequence[int], param: str | None = None) -> list[str]:
    """The vocabulary's entry for each id.

    Raises:
        RecordError: an id is not in the vocabulary.
    """
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


def detokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, special tokens included. Raises as `token_strings`."""
    token_strings(tokenizer, ids)
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text
