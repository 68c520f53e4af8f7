"""Tokenize texts with their exact cost, and pad batches to their longest text."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from headrace.columns import Column, PreparedColumn, values_of
from headrace.device.pipeline import OutputRows
from headrace.engines.base import Chunks, Part, Prepared, PreparedRecords, PromptedText, TokenIds
from headrace.engines.model_config import ModelConfig
from headrace.engines.requests.vocabulary import Vocabulary, check_ids
from headrace.engines.text.max_length import choose_length, usable_positions
from headrace.engines.text.prompts import Prompts
from headrace.engines.text.splitting import LongTexts, joined_ids, tokens_before_text
from headrace.engines.text.token_rows import TokenColumn, TokenRows, Tokens, offsets_of
from headrace.engines.text.truncation import TextTruncator
from headrace.engines.text.word_tokens import ID_BYTES, packed, word_tokens
from headrace.errors import RecordError
from headrace.records import kind_of, text_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_PLACES = "token_places"
"""The input array that says where the tokens of all texts are in the flattened batch, also those that nothing attends
to."""


Join: TypeAlias = Callable[[Sequence[OutputRows], Sequence[int]], object]
"""Makes one output of the rows of a text's chunks, and their weights."""

Ready: TypeAlias = "Prepared[Tokens] | Prepared[Chunks[Part[Tokens]]] | RecordError"

Takes: TypeAlias = Literal["text", "pair", "either", "premise"]
"""The input type. "premise" is a pair of which only the first text is truncated."""

_AT_ONCE = 1_024
"""Texts of a block that are encoded together: an encoding takes many times the memory of its ids."""

_LONG = 4
"""Characters per token of the limit: if both texts of a pair are longer, they are truncated here."""

# The words of test texts.
_WORDS = tuple("the canal feeds a mill and its wheel turns so that water never stands still in 7 ponds".split())  # noqa: SIM905


class TextTokens(Vocabulary):
    """Tokenizes texts for a model. Thread-safe.

    Args:
        tokenizer: the model's transformers tokenizer.
        long_texts: what happens to texts with more than `max_model_len` tokens.
        prompts: prepended to texts; None for none.
        pad_id: the model's padding token; None for the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        long_texts: LongTexts,
        *,
        takes: Takes = "text",
        prompts: Prompts | None = None,
        pad_id: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.long_texts = long_texts
        self._takes = takes
        # A private copy: the model's tokenizer sets truncation and padding on each call, which is not thread-safe.
        # This copy is not changed after construction.
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._sample = self._tokenizer.encode("text")
        self._pair_sample = None if takes == "text" else self._tokenizer.encode("text", "pair")
        self._tokenizer.enable_truncation(
            max_model_len,
            strategy="only_first" if takes == "premise" else "longest_first",
            direction=tokenizer.truncation_side,
        )
        self._cutter = TextTruncator(self._tokenizer, tokenizer.truncation_side)
        self._side = tokenizer.truncation_side
        self.inputs = frozenset(tokenizer.model_input_names) | {"input_ids", "attention_mask"}
        """Names of the model's input arrays."""
        if pad_id is None or pad_id < 0:
            pad_id = tokenizer.pad_token_id
        self._pad_id: int = pad_id or 0
        sample = self._pair_sample or self._sample
        self._typed = "token_type_ids" in tokenizer.model_input_names and any(sample.type_ids)
        self._types_texts = self._typed and any(self._sample.type_ids)
        self._pair_room: int = max_model_len - tokenizer.num_special_tokens_to_add(pair=True)
        self._join: Join | None = None
        self._prompts = prompts or Prompts()
        first = self._prompts.default
        self.prompt_length = tokens_before_text(self._tokenizer.encode(first)) if first else 0
        """Tokens of the default prompt, including the special tokens before a text."""
        takes_texts = takes in ("text", "either")
        self._plain_characters = self._cutter.most_uncut(max_model_len + 1) - len(first) if takes_texts else -1
        self._text_room = max_model_len - tokenizer.num_special_tokens_to_add()
        self._word_tokens = word_tokens(self._tokenizer, self._cutter.ids, max_model_len, self._side)
        if long_texts.splits:
            long_texts.check_room(self._text_room if takes in ("text", "either") else self._pair_room)
        # The job's workers tokenize chunks in parallel. A thread pool inside each call would take cores from the model
        # on CPU, and warns when a process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def split_with(self, join: Join) -> None:
        """Say how the outputs for the chunks of a text become one. Call it before `prepare`."""
        self._join = join

    def prepare(self, inputs: Sequence[Any]) -> PreparedRecords:
        """Tokens of each input, with their number as cost; a RecordError if the input has the wrong type.

        An empty text is accepted if the model adds special tokens.
        """
        if all(map(self._is_plain, inputs)):
            ids, types, cut = self._ids(inputs)
            return list(map(self._prepared, map(self._unpacked, ids, *([types] if types else [])), cut, inputs))
        errors = [self.refusal(value) for value in inputs]
        good = [value for value, error in zip(inputs, errors, strict=True) if error is None]
        done = {place: ready for place, value in enumerate(good) if (ready := self._ready(value)) is not None}
        rest = [self._shortened(value) for place, value in enumerate(good) if place not in done]
        encoded = ((self._arrays(one), bool(one.overflowing)) for one in self._tokenizer.encode_batch_fast(rest))
        prepared = (
            done[place] if place in done else self._prepared(*next(encoded), value) for place, value in enumerate(good)
        )
        return [next(prepared) if error is None else error for error in errors]

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Each input's tokens or error, as `prepare` gives them, if no text is split."""
        if (looked_up := self._looked_up(inputs)) is not None:
            return looked_up.prepared()
        values = values_of(inputs)
        if self._are_plain(values):
            return self._encoded(values).prepared()
        plain = {row: value for row, value in enumerate(values) if self._is_plain(value)}
        others = {row: value for row, value in enumerate(values) if row not in plain}
        one_by_one = self.column_of(self.prepare(list(others.values())))
        return self._encoded(list(plain.values())).merged(one_by_one, np.array([*plain, *others], np.intp)).prepared()

    def column_of(self, prepared: PreparedRecords) -> TokenColumn:
        """What `prepare` gives, none of it split, as a column."""
        errors = {row: one for row, one in enumerate(prepared) if isinstance(one, Exception)}
        nothing = np.zeros((1 + self._typed, 0), dtype=np.int32)
        texts = [nothing if isinstance(one, Exception) else one.payload for one in prepared]
        truncated = sum(one.truncated for one in prepared if not isinstance(one, Exception))
        return TokenColumn(self.rows_of(texts), errors, truncated)

    def rows_of(self, texts: Sequence[Tokens]) -> TokenRows:
        return TokenRows.of(texts, 1 + self._typed)

    def _looked_up(self, inputs: Column) -> TokenColumn | None:
        """The tokens of a column of texts, most of them by their words, all at once; None if that cannot be done."""
        words = self._word_tokens if self._takes in ("text", "either") and not self._prompts.default else None
        if words is None or isinstance(inputs, Sequence) or str(inputs.type) != "string" or inputs.null_count:
            return None
        odd = words.odd_rows(inputs)
        if len(odd) > len(inputs) // 2:
            return None
        usual = np.delete(np.arange(len(inputs)), odd)
        ids, bounds, cut = words.of_column(inputs.take(usual) if len(odd) else inputs)
        flat = np.zeros((1 + self._typed, len(ids)), np.int32)
        flat[0] = ids
        found = self._refused(TokenRows(flat, bounds), cut)
        if not len(odd):
            return found
        one_by_one = self.column_of(self.prepare([inputs[row].as_py() for row in odd]))
        return found.merged(one_by_one, np.append(usual, odd))

    def _encoded(self, texts: Sequence[str]) -> TokenColumn:
        ids, types, cut = self._ids(texts)
        offsets = offsets_of(np.fromiter(map(len, ids), np.int64, len(ids)) // ID_BYTES)
        flat = np.zeros((1 + self._typed, offsets[-1]), dtype=np.int32)
        flat[0] = np.frombuffer(b"".join(ids), np.int32)
        if types:
            flat[1] = np.frombuffer(b"".join(types), np.int32)
        return self._refused(TokenRows(flat, offsets), np.array(cut, bool))

    def _refused(self, rows: TokenRows, cut: NDArray[np.bool_]) -> TokenColumn:
        """The tokens of texts, some of which were cut off, with errors for those that are refused."""
        errors: dict[int, Exception] = dict.fromkeys(np.flatnonzero(rows.lengths == 0).tolist(), _no_tokens())
        refuses = self.long_texts.on_too_long == "error"
        if refuses:
            errors |= {row: self._too_long() for row in np.flatnonzero(cut).tolist()}
        return TokenColumn(rows, errors, 0 if refuses else int(cut.sum()))

    def _ids(self, texts: Sequence[str]) -> tuple[list[bytes], list[bytes], list[bool]]:
        """The tokens of plain texts, their types where some are not 0, and whether tokens were cut off."""
        first = self._prompts.default
        texts = [first + text for text in texts] if first else list(texts)
        if self._word_tokens is None:
            ids, cut, left = [b""] * len(texts), [False] * len(texts), list(range(len(texts)))
        else:
            ids, cut, left = self._word_tokens.of(texts)
        types: list[bytes] = []
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            encodings = self._tokenizer.encode_batch_fast([texts[row] for row in some])
            for row, encoding in zip(some, encodings, strict=True):
                ids[row], cut[row] = packed(encoding.ids), bool(encoding.overflowing)
            types += [packed(encoding.type_ids) for encoding in encodings if self._types_texts]
        return ids, types, cut

    def _are_plain(self, values: Sequence[object]) -> TypeGuard[Sequence[str]]:
        """`_is_plain` of all values, mostly without a call for each."""
        if set(map(type, values)) != {str}:
            return False
        texts = cast("Sequence[str]", values)
        if max(map(len, texts)) <= self._plain_characters and all(map(str.isascii, texts)):
            return True
        return all(map(self._is_plain, texts))

    def _is_plain(self, value: object) -> TypeGuard[str]:
        """Whether the tokenizer takes an input as it is, as nearly all: valid text, not very long."""
        if type(value) is not str or len(value) > self._plain_characters:
            return False
        try:
            return value.isascii() or bool(value.encode())
        except UnicodeEncodeError:
            return False

    def refusal(self, value: object) -> RecordError | None:
        """The error for an invalid input; None if it is valid."""
        if isinstance(value, TokenIds) and self._takes == "text":
            return None
        if isinstance(value, PromptedText) and self._takes == "text":
            return self._prompts.refusal(value) or text_refusal(value.text)
        if isinstance(value, (tuple, list)) and self._takes != "text":
            if len(value) != 2:
                return RecordError(f"the input is a list of {len(value)}, not a pair of texts")
            return text_refusal(value[0]) or text_refusal(value[1])
        if self._takes in ("pair", "premise"):
            return RecordError(f"the input is {kind_of(value)}, not a pair of texts")
        return text_refusal(value)

    def pair_length(self, second: str) -> int:
        """The number of tokens of a pair with an empty first text, without truncation."""
        return self.max_model_len - self._pair_room + len(self._cutter.ids(second))

    def tokenize(self, value: object, add_special_tokens: bool) -> list[int]:
        """The ids of a text with its prompt, before they are cut."""
        if refusal := text_refusal(value):
            raise refusal
        return self._cutter.ids(self._prompts.before(str(value)), add_special_tokens=add_special_tokens)

    def token_spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int] | None]:
        """Where each token of `tokenize` is in the text; None for those that are not in it."""
        whole = self._prompts.before(text)
        return self._cutter.spans(whole, add_special_tokens=add_special_tokens, skipped=len(whole) - len(text))

    def expanded(self, tokens: Tokens, ids: Sequence[int], attended: bool) -> Tokens:
        """More tokens after those of a text, and a last row that says which tokens are attended to."""
        more = np.zeros((len(tokens) + 1, len(ids)), dtype=np.int32)
        more[0], more[-1] = ids, attended
        return np.concatenate([np.vstack([tokens, np.ones_like(tokens[:1])]), more], axis=1)

    def samples(self) -> list[Tokens]:
        """Test texts or pairs of different lengths, longest first; the longest exceeds usual attention windows."""
        texts = [" ".join(_WORDS[place * 7 % len(_WORDS)] for place in range(count)) for count in (160, 7, 23, 1)]
        second = (None,) if self._takes == "text" else (texts[1],)
        return [self._arrays(self._tokenizer.encode(self._prompts.before(text), *second)) for text in texts]

    def collate(
        self,
        batch: TokenRows,
        names: frozenset[str],
        side: Literal["right", "left"] = "right",
        longest: int | None = None,
    ) -> dict[str, NDArray[np.int64]]:
        """The input arrays listed in `names`, of shape (texts, longest), padded on `side`."""
        lengths = batch.lengths[:, None]
        columns = np.arange(longest or batch.longest)
        real = columns < lengths if side == "right" else columns >= len(columns) - lengths
        arrays: dict[str, NDArray[np.int64]] = {}
        if "input_ids" in names:
            arrays["input_ids"] = _scattered(batch.flat[0], real, self._pad_id)
        if "attention_mask" in names:
            attended = batch.attended
            arrays["attention_mask"] = real.astype(np.int64) if attended is None else _scattered(attended, real, 0)
        if "token_type_ids" in names:
            arrays["token_type_ids"] = (
                _scattered(batch.flat[1], real, 0) if self._typed else np.zeros(real.shape, dtype=np.int64)
            )
        if TOKEN_PLACES in names:
            arrays[TOKEN_PLACES] = np.flatnonzero(real)
        return arrays

    def packed(self, batch: TokenRows, names: frozenset[str], length: int) -> dict[str, NDArray[np.int32]]:
        """The input arrays listed in `names`, and `position_ids`, of shape (length,), with the tokens of all texts.

        Positions count from 0. The row ends with copies of its first token.
        """
        tokens = batch.flat.shape[1]
        filling = length - tokens
        positions = np.arange(tokens, dtype=np.int32) - np.repeat(batch.offsets[:-1].astype(np.int32), batch.lengths)
        arrays = {"input_ids": batch.flat[0], "position_ids": positions}
        if "token_type_ids" in names:
            arrays["token_type_ids"] = batch.flat[1] if self._typed else np.zeros(tokens, dtype=np.int32)
        if filling:
            return {name: np.concatenate([array, np.repeat(array[:1], filling)]) for name, array in arrays.items()}
        return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}

    def _ready(self, value: str | Sequence[str] | PromptedText | TokenIds) -> Ready | None:
        """The model input of a value that the tokenizer does not handle; None for others."""
        if isinstance(value, PromptedText):
            return None
        if not isinstance(value, TokenIds):
            return self._cut_pair(value)
        ids = value.ids
        try:
            check_ids(self._tokenizer, ids)
        except RecordError as error:
            return error
        if len(ids) > self.max_model_len:
            return RecordError(
                f"the input has {len(ids):,} token ids, more than the model's maximum of {self.max_model_len}; ids are "
                "not cut: send fewer, or text"
            )
        rows = [ids, (0,) * len(ids)] if self._typed else [ids]
        return Prepared(np.array(rows, dtype=np.int32), cost=len(ids))

    def _shortened(self, value: str | Sequence[str] | PromptedText) -> str | Sequence[str]:
        """An input without most of the text that truncation would remove. Tokens after truncation stay the same.

        If both texts of a pair are too long, the longer one keeps the odd token, so their lengths must be known.
        """
        enough = self.max_model_len + 1
        if isinstance(value, (str, PromptedText)):
            return self._cutter.cut(self._prompts.before(value), enough)
        first, second = value
        if self._takes == "premise":
            return self._cutter.cut(first, enough), second
        if max(len(first), len(second)) <= enough:
            return first, second
        shorter, longer = sorted((first, second), key=len)
        if self._pair_room % 2 == 0:
            shorter = self._cutter.cut(shorter, enough)
        longer = self._cutter.cut(longer, max(enough, len(self._cutter.ids(shorter)) + 1))
        return (shorter, longer) if len(first) <= len(second) else (longer, shorter)

    def _cut_pair(self, value: str | Sequence[str]) -> Ready | None:
        """Truncate a pair of two long texts as the tokenizer would; None for a pair that the tokenizer can handle.

        The tokenizer builds all combinations of the overflowing parts: gigabytes for two texts of 30,000 tokens.
        """
        sample = self._pair_sample
        if sample is None or isinstance(value, str) or self._takes == "premise":
            return None
        if min(map(len, value)) <= _LONG * self.max_model_len or not {0, 1} <= set(sample.sequence_ids):
            return None
        first, second = map(self._cutter.ids, self._shortened(value))
        room = self._pair_room
        if len(first) + len(second) <= room or min(len(first), len(second)) <= room // 2:
            return None
        if self.long_texts.on_too_long == "error":
            return self._too_long()
        if self.long_texts.splits:
            return self._split(value)
        more = room // 2 + room % 2  # the longer text keeps the odd token
        kept = (more, room // 2) if len(first) > len(second) else (room // 2, more)
        left = self._side == "left"
        parts = [ids[-count:] if left else ids[:count] for ids, count in zip((first, second), kept, strict=True)]
        rows = joined_ids(sample, parts)
        return Prepared(np.array(rows if self._typed else rows[:1], dtype=np.int32), len(rows[0]), truncated=True)

    def _split(self, value: str | Sequence[str] | PromptedText) -> Ready:
        """The chunks of a long text. Each has the prompt and special tokens, or the shorter text of a pair."""
        if isinstance(value, (str, PromptedText)):
            text = self._prompts.before(value)
            ids = self._cutter.all_ids(text)
            prompt = self._cutter.count_before(text, len(text) - len(value if isinstance(value, str) else value.text))
            again, ids, room, sample, place = ids[:prompt], ids[prompt:], self._text_room, self._sample, 0
        else:
            first, second = map(self._cutter.all_ids, value)
            place = 0 if len(first) > len(second) else 1
            again, ids = (second, first) if place == 0 else (first, second)
            room, sample = self._pair_room, self._pair_sample or self._sample
        room -= len(again)
        if self.long_texts.overlap >= room:
            return RecordError(
                f"the text cannot be split: {len(again):,} tokens of its prompt, or of the shorter text of the pair, "
                f"must be in each chunk, which leaves room for {max(room, 0):,}; chunk_overlap is "
                f"{self.long_texts.overlap}"
            )
        assert self._join is not None, "the engine has said it"
        cuts = list(self.long_texts.chunks(len(ids), room))
        shared = again.tolist()
        parts: list[Part[Tokens]] = []
        for cut in cuts:
            chunk = ids[cut].tolist()
            if sample is self._sample:
                rows = joined_ids(sample, [shared + chunk])
            else:
                rows = joined_ids(sample, [chunk, shared] if place == 0 else [shared, chunk])
            parts.append(Part(np.array(rows if self._typed else rows[:1], dtype=np.int32)))
        costs = [part.payload.shape[1] for part in parts]
        return Prepared(Chunks(parts, costs, [cut.stop - cut.start for cut in cuts], self._join), cost=sum(costs))

    def _too_long(self) -> RecordError:
        return RecordError(
            f"the text is longer than the model's maximum of {self.max_model_len} tokens; "
            "on_too_long='truncate' truncates it, and 'split' splits it"
        )

    def _prepared(self, tokens: Tokens, truncated: bool, value: str | Sequence[str] | PromptedText) -> Ready:
        if truncated and self.long_texts.on_too_long == "error":
            return self._too_long()
        if truncated and self.long_texts.splits:
            return self._split(value)
        if not tokens.size:
            return _no_tokens()
        return Prepared(tokens, cost=tokens.shape[1], truncated=truncated)

    def _arrays(self, encoding: Encoding) -> Tokens:
        rows = [encoding.ids, encoding.type_ids] if self._typed else [encoding.ids]
        return np.array(rows, dtype=np.int32)

    def _unpacked(self, ids: bytes, types: bytes | None = None) -> Tokens:
        tokens = np.zeros((1 + self._typed, len(ids) // ID_BYTES), dtype=np.int32)
        tokens[0] = np.frombuffer(ids, np.int32)
        if types is not None:
            tokens[1] = np.frombuffer(types, np.int32)
        return tokens


def _no_tokens() -> RecordError:
    return RecordError("the text is empty or only white space, and has no tokens for this model")


def _scattered(values: NDArray[np.int32], real: NDArray[np.bool_], filling: int) -> NDArray[np.int64]:
    """The values of all texts at the real places, row by row."""
    array = np.full(real.shape, filling, dtype=np.int64)
    array[real] = values
    return array


def without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that adds no special tokens to a text."""
    plain = copy.deepcopy(tokenizer)
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    return plain


def tokens_for(
    tokenizer: PreTrainedTokenizerBase,
    config: ModelConfig,
    takes: Takes,
    max_model_len: int | None,
    long_texts: LongTexts,
    prompts: Prompts | None = None,
) -> TextTokens:
    """Create the tokenization of a plain transformers model from its tokenizer and config.json.

    Raises:
        ConfigError: `max_model_len` is out of range.
    """
    smallest = tokenizer.num_special_tokens_to_add(pair=takes != "text") + 1
    own = config.get("sentence_transformers") or {}
    if not own.get("special_tokens", True):
        tokenizer = without_special_tokens(tokenizer)
    limits = [tokenizer.model_max_length, own.get("max_seq_length")]
    length = choose_length(limits, usable_positions(config), smallest, max_model_len)
    pad_id = config.get("pad_token_id")
    return TextTokens(tokenizer, length, long_texts, takes=takes, prompts=prompts, pad_id=pad_id)
