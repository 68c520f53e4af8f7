"""Tokens of texts from the tokens of their words, which are kept: for BERT's tokenizers.

The same words come again and again, and looking them up takes a small part of the time of computing their tokens. BERT
splits texts at white space and at punctuation, and the tokens of a word depend on nothing else. Texts with characters
of which that is not known are left to the tokenizer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from headrace.engines.text.truncation import Side

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_KEPT = 1 << 16
"""Words, and as many stretches between white space; at most some 30 MB."""
_LONGEST_KEPT = 32
"""Characters of a stretch or word that is kept. Longer ones rarely come again."""
_WORDS = re.compile(r"[!-/:-@\[-`{-~]|[^!-/:-@\[-`{-~]+")
"""Each mark of ASCII, and what is between two."""
_OTHERS = re.compile("[^\t\n\r -~\xa0-\u024f\u2010-\u2027]")
"""Control characters, which BERT drops, so that their neighbours become one word; and scripts that may be written
without spaces."""
_SAMPLE = "a text, and"
ID_BYTES = array("i").itemsize
"""Bytes of a packed id."""


class _Kept(dict[str, bytes]):
    """Token ids by text, made when they are first asked for. Several threads may ask."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._make = make

    def __missing__(self, text: str) -> bytes:
        found = self._make(text)
        if len(text) <= _LONGEST_KEPT:
            if len(self) >= _MOST_KEPT:
                self.clear()
            self[text] = found
        return found


class WordTokens:
    """Token ids of texts, as int32 in bytes, with special tokens around them.

    Args:
        ids: all tokens of a text, without special tokens.
        added: the texts that are tokens of their own wherever they stand.
        before: the special tokens before a text.
        after: those after it.
        most: the most tokens of a text, those among them.
        side: where longer ones are cut.
    """

    def __init__(
        self,
        ids: Callable[[str], Sequence[int]],
        added: Sequence[str],
        before: Sequence[int],
        after: Sequence[int],
        most: int,
        side: Side,
    ) -> None:
        self._made_of = ids, added, before, after, most, side
        words = _Kept(lambda word: packed(ids(word)))
        self._stretches = _Kept(lambda stretch: b"".join(map(words.__getitem__, _WORDS.findall(stretch))))
        self._added = added
        self._before, self._after = packed(before), packed(after)
        self._most = most * ID_BYTES
        self._left = side == "left"

    def __reduce__(self) -> tuple[type[WordTokens], tuple[object, ...]]:
        """A process that gets a copy begins without words."""
        return WordTokens, self._made_of

    def odd_rows(self, texts: pa.StringArray) -> NDArray[np.intp]:
        """The texts of a column that are left to the tokenizer."""
        import pyarrow.compute as pc

        pattern = "|".join([_OTHERS.pattern, *(rf"\Q{token}\E" for token in self._added)])
        return np.flatnonzero(pc.match_substring_regex(texts, pattern))

    def of_column(self, texts: pa.StringArray) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens of all texts, where those of each begin and the last end, and whether some were cut off.

        Arrow does nearly all of the work, for all words at once and without Python's lock.

        Args:
            texts: at least one, none of them odd.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        binary = pa.large_binary()
        before, after = (pa.scalar(tokens, binary) for tokens in (self._before, self._after))
        ascii_alone = pc.all(pc.string_is_ascii(texts)).as_py()
        listed = (pc.ascii_split_whitespace if ascii_alone else pc.utf8_split_whitespace)(texts)
        coded = listed.flatten().dictionary_encode()
        kept = pa.array(map(self._stretches.__getitem__, coded.dictionary.to_pylist()), binary)
        content, ends = _content(kept.take(coded.indices))
        bounds = ends[np.append(0, np.cumsum(listed.value_lengths()))]
        room = self._most - len(self._before) - len(self._after)
        cut = np.diff(bounds) > room
        pieces = np.column_stack((bounds[:-1], bounds[1:]))  # what is between two of them is left out
        pieces[cut, 0 if self._left else 1] = pieces[cut, 1] - room if self._left else pieces[cut, 0] + room
        buffers = [None, pa.py_buffer(pieces), content]
        own = pa.Array.from_buffers(binary, pieces.size - 1, buffers).take(pa.array(np.arange(0, pieces.size, 2)))
        content, ends = _content(pc.binary_join_element_wise(before, own, after, pa.scalar(b"", binary)))
        return np.frombuffer(content, np.int32, ends[-1] // ID_BYTES), ends // ID_BYTES, cut

    def of(self, texts: Sequence[str]) -> tuple[list[bytes], list[bool], list[int]]:
        """The tokens of each text, and whether some were cut off; and which are left to the tokenizer."""
        left: list[int] = []
        if not self._fits("\n".join(texts)):
            left = [row for row, text in enumerate(texts) if not self._fits(text)]
            texts = list(texts)
            for row in left:
                texts[row] = ""
        stretch, before, after = self._stretches.__getitem__, self._before, self._after
        rows = [before + b"".join(map(stretch, text.split())) + after for text in texts]
        cut = [len(row) > self._most for row in rows]
        for row in compress(range(len(rows)), cut):
            own = rows[row][len(before) : len(rows[row]) - len(after)]
            excess = len(rows[row]) - self._most
            rows[row] = before + (own[excess:] if self._left else own[:-excess]) + after
        return rows, cut, left

    def _fits(self, text: str) -> bool:
        plain = text.isascii() and text.replace("\n", " ").isprintable()
        return (plain or _OTHERS.search(text) is None) and not any(token in text for token in self._added)


def word_tokens(
    tokenizer: Tokenizer, ids: Callable[[str], Sequence[int]], max_model_len: int, side: Side
) -> WordTokens | None:
    """The `WordTokens` of a tokenizer; None if it is not known to treat each word alone."""
    kinds = (
        (tokenizer.model, WordPiece),
        (tokenizer.normalizer, BertNormalizer),
        (tokenizer.pre_tokenizer, BertPreTokenizer),
    )
    if not all(type(part) is kind for part, kind in kinds):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    sample = tokenizer.encode(_SAMPLE)
    places = [place for place, sequence in enumerate(sample.sequence_ids) if sequence is not None]
    first, end = places[0], places[-1] + 1
    before, own, after = sample.ids[:first], sample.ids[first:end], sample.ids[end:]
    if own != list(ids(_SAMPLE)) or any(sample.type_ids) or any(token.normalized for token in added):
        return None
    return WordTokens(ids, [token.content for token in added], before, after, max_model_len, side)


def _content(array: pa.Array) -> tuple[pa.Buffer, NDArray[np.int64]]:
    """The bytes of a `large_binary` array that is no part of another, and where each value ends there, after a 0."""
    import pyarrow as pa

    _, ends, content = array.buffers()
    return content or pa.py_buffer(b""), np.frombuffer(ends or bytes(8), np.int64, len(array) + 1)


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
