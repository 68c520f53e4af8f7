"""Shorten very long texts before tokenization without changing the tokens that are kept.

The tokenizer's own truncation encodes the whole text first: 0.36 s for a million characters, here 1 ms. For a text of
6,000 characters and a model of 256 tokens, cutting saves 0.4 of the time; shorter ones are left as they are.

Tokenizers work from left to right, and the token of a character depends only on nearby text. So the tokens of a prefix
equal those of the whole text, except for the last ones. How many differ depends on the tokenizer:

- If it splits texts into words, no token extends beyond its word: all but the last few words are safe.
- Otherwise, or if a word is as long as the prefix, a token of the whole text ends within the last characters of the
  prefix, as many as the longest token has. With BPE and Unigram, the tokens up to that point are those of the text up
  to that point. So the tokens that all prefixes ending there have in common are safe.

If neither yields enough tokens, a longer prefix is tried, and finally the whole text.

Text in pieces (`TextTruncator.all_ids`) is another matter, because a piece lacks what comes before it. Equal tokens
where two pieces are joined do not prove that those after them are equal: in `120120120`, digits by threes from another
start may have the same tokens, until the number changes. What proves it depends on the tokenizer too:

- If it splits texts into words, a word that starts at the same place in both pieces: a word does not depend on those
  before it. Within a word, nothing is joined.
- If it does not, and is BPE, tokens that are the same in both: whether two neighbours are merged depends on no others.
- Unigram without words adds up the scores of all tokens from the start, and of `the the` two divisions have equal
  scores but for rounding, which depends on the sum. So nothing is proven, and the text is not read in pieces.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE, Model, Unigram, WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Metaspace

Side: TypeAlias = Literal["right", "left"]
"""The side where texts are truncated, as in tokenizers."""

_CHARACTERS_PER_TOKEN = 6
"""For the first prefix that is tried; most texts have 4 to 5."""
_MORE_CHARACTERS = 256
_WORTH_CUTTING = 3
"""A text this many times as long as a prefix is worth trying it."""
_WORDS = 4
"""Words at the end of a prefix that may differ in the whole text, for example in a run of spaces."""
_CHARACTERS = 32
"""Characters at the end of a prefix that may differ, for example combining marks or partial special tokens."""

_PIECE = 1 << 16
"""Characters of a long text that are tokenized together."""
_OVERLAP = 32
"""Neighbouring pieces have one character in this many in common, but at least `_LEAST_OVERLAP` characters."""
_LEAST_OVERLAP = 2048
_ALIKE = 8
"""Tokens in a row that must be the same in two pieces where they are joined."""

_RUN = 1000
"""In characters; longer than any token."""


class TextTruncator:
    """Shortens texts for one tokenizer. Thread-safe.

    Args:
        tokenizer: copied without truncation and padding.
    """

    def __init__(self, tokenizer: Tokenizer, side: Side = "right") -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._side = side
        self._longest = max(map(len, self._tokenizer.get_vocab())) if _joins(self._tokenizer.model) else 0
        self._changes = self._tokenizer.normalizer is not None
        self._trims = _trims(self._tokenizer)
        self._strips = any(token.lstrip for token in self._tokenizer.get_added_tokens_decoder().values())
        self._runs = _long_runs(self._tokenizer)
        self._words = _splits(self._tokenizer)
        self._in_pieces_too = self._words or (self._longest > 0 and isinstance(self._tokenizer.model, BPE))

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def spans(self, text: str, *, add_special_tokens: bool, skipped: int = 0) -> list[tuple[int, int] | None]:
        """Where each token of `ids` is in the text after its first `skipped` characters; None for those elsewhere."""
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        places = zip(found.special_tokens_mask, found.offsets, strict=True)
        return [
            None if special or end <= skipped else (max(start - skipped, 0), end - skipped)
            for special, (start, end) in places
        ]

    def all_ids(self, text: str, piece: int = _PIECE) -> NDArray[np.int32]:
        """All tokens of a text of any length, read in pieces: a token takes far more memory than its characters.

        Two pieces overlap. They are joined in the middle of the overlap, where several tokens in a row are the same in
        both and a word starts. If there are none, as in a word that is longer than the overlap, larger pieces are
        tried.
        """
        while self._in_pieces_too and piece < len(text):
            found = self._in_pieces(text, piece)
            if found is not None:
                return found
            if self._runs is not None:
                text = self._runs.sub(lambda run: run[0][:_RUN], text)
            piece *= 8
        return np.array(self.ids(text), dtype=np.int32)

    def _in_pieces(self, text: str, piece: int) -> NDArray[np.int32] | None:
        """All tokens, or None where two pieces cannot be joined."""
        overlap = max(piece // _OVERLAP, _LEAST_OVERLAP)
        found: list[NDArray[np.int64]] = []
        start, tokens = 0, self._placed(text, 0, piece)
        while start + piece < len(text):
            start += piece - overlap
            following = self._placed(text, start, start + piece)
            seam = _seam(tokens, following, start + overlap // 2, partial(self._may_join, text))
            if seam is None:
                return None
            found.append(tokens[: seam[0], 0])
            tokens = following[seam[1] :]
        return np.concatenate([*found, tokens[:, 0]]).astype(np.int32)

    def _placed(self, text: str, start: int, end: int) -> NDArray[np.int64]:
        """The tokens of a part of a text, a row for each: id, first character, the one after the last, new word."""
        encoding = self._encode(text[start:end])
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(len(ids), 2)
        words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
        return np.column_stack([ids, offsets + start, np.diff(words, prepend=-2) != 0])

    def _may_join(self, text: str, token: NDArray[np.int64]) -> bool:
        """Whether two pieces with this token may be joined before it."""
        _, first, _, new_word = token.tolist()
        if self._words and not new_word:
            return False
        return not self._changes or all(map(_plain, text[first - 1 : first + 1]))

    def count_before(self, text: str, end: int) -> int:
        """How many of a text's first tokens lie before this character."""
        placed = self._placed(text, 0, end + _MORE_CHARACTERS) if end else ()
        return next((n for n, (_, _, last, _) in enumerate(placed) if last > end), len(placed))

    @staticmethod
    def most_uncut(tokens: int) -> int:
        """The most characters of a text that `cut` returns as it is."""
        return _WORTH_CUTTING * (_CHARACTERS_PER_TOKEN * tokens + _MORE_CHARACTERS)

    def cut(self, text: str, tokens: int) -> str:
        """A prefix of the text with more than `tokens` tokens, the first `tokens` of which are the same; or the text.

        With the side "left", a suffix with the same last tokens.
        """
        size = _CHARACTERS_PER_TOKEN * tokens + _MORE_CHARACTERS
        while _WORTH_CUTTING * size < len(text):
            part = self._beginning(text, size, tokens) if self._side == "right" else self._end(text, size, tokens)
            if part is not None:
                return part
            if self._runs is not None:
                text = self._runs.sub(lambda run: run[0][:_RUN], text)
            size *= 4
        return text

    def _beginning(self, text: str, size: int, tokens: int) -> str | None:
        part = text[:size]
        encoding = self._encode(part)
        if len(encoding.ids) <= tokens:
            return None
        end = encoding.offsets[tokens - 1][1]
        settled = _words_between(encoding, tokens - 1, -1) and end + _CHARACTERS <= len(part.rstrip())
        if (settled and not part[end:].isnumeric()) or self._in_common(text, size, tokens, encoding):
            return part
        return None

    def _in_common(self, text: str, size: int, tokens: int, encoding: Encoding) -> bool:
        """Whether all prefixes that end where a token of the whole text may end start with the same tokens."""
        longest = self._longest
        if not longest or 2 * longest * size > len(text):
            return False  # the whole text is not more work
        end = encoding.offsets[tokens - 1][1]
        if end > size - 2 * longest - _CHARACTERS:
            return False
        if self._strips and end > len(text[: size - longest].rstrip()):
            return False  # a special token such as RoBERTa's <mask> includes all white space before it
        if self._changes and not all(map(_plain, text[size - longest : size + 1])):
            return False
        if self._trims and any(map(str.isspace, text[size - longest - 1 : size])):
            return False  # a prefix that ends with white space would be tokenized without it
        parts = [text[:end] for end in range(size - longest, size)]
        first = encoding.ids[:tokens]
        return all(
            one.ids[:tokens] == first for one in self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        )

    def _end(self, text: str, size: int, tokens: int) -> str | None:
        """A suffix that starts with a word after white space, which no token crosses."""
        start = next(
            (
                place
                for place in range(len(text) - size, len(text) - size + _MORE_CHARACTERS)
                if text[place - 1].isspace() and text[place].isalpha()
            ),
            None,
        )
        if start is None:
            return None
        part = text[start:]
        encoding = self._encode(part)
        first = len(encoding.ids) - tokens
        if first <= 0 or not _words_between(encoding, 0, first):
            return None
        before = part[: encoding.offsets[first][0]]
        return part if len(before) >= _CHARACTERS and any(map(str.isspace, before[1:])) else None

    def _encode(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _seam(
    before: NDArray[np.int64], after: NDArray[np.int64], middle: int, may_join: Callable[[NDArray[np.int64]], bool]
) -> tuple[int, int] | None:
    """Where two pieces have the same tokens, at or after a character: an index in each; None if they nowhere do."""
    first = int(np.searchsorted(after[:, 1], middle))
    for index in range(first, len(after) - _ALIKE):
        if not may_join(after[index]):
            continue
        place = int(np.searchsorted(before[:, 1], after[index, 1]))
        while place + _ALIKE < len(before) and before[place, 1] == after[index, 1]:
            if np.array_equal(before[place : place + _ALIKE], after[index : index + _ALIKE]):
                return place, index
            place += 1
        if place + _ALIKE >= len(before):
            return None
    return None


def _joins(model: Model) -> bool:
    """Whether a model joins characters to tokens without an end-of-word suffix (such as CLIP's)."""
    return isinstance(model, Unigram) or (isinstance(model, BPE) and not model.end_of_word_suffix)


def _splits(tokenizer: Tokenizer) -> bool:
    split = tokenizer.pre_tokenizer
    if isinstance(split, ByteLevel):
        return bool(split.use_regex)
    return bool(split.split) if isinstance(split, Metaspace) else split is not None


def _trims(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer removes the white space at the end of a text."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and len(normalizer.normalize_str("a ")) != len(normalizer.normalize_str("a b")) - 1


def _long_runs(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches runs that can be shortened to `_RUN` characters: in BERT, overlong words and white space."""
    model = tokenizer.model
    plain = isinstance(model, WordPiece) and model.max_input_chars_per_word < _RUN
    if not plain or not isinstance(tokenizer.pre_tokenizer, BertPreTokenizer):
        return None
    if any(
        token.content.isalnum() or token.content.isspace() for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return None
    return re.compile(rf"[0-9A-Za-z]{{{_RUN},}}|[ \t\r\n]{{{_RUN},}}")


def _words_between(encoding: Encoding, first: int, last: int) -> bool:
    """Whether at least `_WORDS` words lie between two tokens."""
    one, other = encoding.word_ids[first], encoding.word_ids[last]
    return one is not None and other is not None and other - one >= _WORDS


def _plain(character: str) -> bool:
    """Whether normalization of a character does not depend on its neighbours."""
    if character.isascii():
        return character.isprintable()
    number = ord(character)
    composes = 0x1100 <= number <= 0x11FF or 0xA960 <= number <= 0xA97F or 0xAC00 <= number <= 0xD7FF
    vowel = number in (0x0E33, 0x0EB3)
    flag = 0x1F1E6 <= number <= 0x1F1FF
    return unicodedata.category(character) in _PLAIN and not composes and not vowel and not flag


_PLAIN = frozenset(
    {"Ll", "Lu", "Lt", "Lo", "Nd", "Nl", "No", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "Sm", "So", "Zs"}
)
