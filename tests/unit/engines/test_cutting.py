"""A text that is shortened before it is encoded has the tokens of the whole one, whatever the tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.fuzz_cutting import KINDS, LONGEST_OF_PAIR, PIECES, Subject
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer

from headrace.engines.base import Prepared
from headrace.engines.text.tokenizing import TextTokens
from headrace.engines.text.truncation import TextTruncator
from headrace.errors import RecordError

RUNS = st.tuples(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), st.sampled_from((1, 2, 40, 700)))
TEXTS = st.lists(RUNS, min_size=1, max_size=12).map(
    lambda runs: "".join(piece * count for piece, count in runs)[:6_000]
)
WORDS = "the canal feeds the mill and its wheel turns so that it never runs dry "


@cache
def subject(kind: str, room: int, side: str, takes: Any = "either") -> Subject:
    return Subject(kind, room, side, takes)


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.characters = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._inner.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, room=st.sampled_from((8, 13)))
@settings(max_examples=15, deadline=None)
def test_the_same_tokens_as_of_the_whole_text(kind: str, side: str, text: str, room: int) -> None:
    assert subject(kind, room, side).difference(text) is None


@pytest.mark.parametrize("takes", ["either", "premise"])
@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
@given(first=TEXTS, second=TEXTS, room=st.sampled_from((100, 101)))
@settings(max_examples=6, deadline=None)
def test_the_same_tokens_as_of_the_whole_pair(kind: str, takes: str, first: str, second: str, room: int) -> None:
    pair = (first[:LONGEST_OF_PAIR], "a mill" if takes == "premise" else second[:LONGEST_OF_PAIR])
    assert subject(kind, room, "right", takes).difference(pair) is None


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "regex", "unigram", "words"])
def test_most_of_a_long_text_is_not_looked_at(kind: str, side: Any) -> None:
    cutter = TextTruncator(KINDS[kind](), side)
    counting: Any = Counting(cutter._tokenizer)
    cutter._tokenizer = counting
    text = WORDS * 15_000
    assert len(text) > 1_000_000
    assert len(cutter.cut(text, 256)) < 4_000
    assert counting.characters < 4_000


@pytest.mark.parametrize("piece", ["a", " "])
def test_a_word_that_is_too_long_for_wordpiece_is_cut_too(piece: str) -> None:
    tokenizer = Tokenizer(WordPiece({"<unk>": 0, "the": 1, "mill": 2}, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    cutter = TextTruncator(tokenizer)
    text = "the " + piece * 1_000_000 + " mill"
    part = cutter.cut(text, 256)
    assert len(part) < 2_000
    assert tokenizer.encode(part).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize(("kind", "piece"), [("unigram", "水"), ("bytes", "漢字")])
def test_a_text_without_words_is_cut_too(kind: str, piece: str) -> None:
    cutter = TextTruncator(KINDS[kind]())
    counting: Any = Counting(cutter._tokenizer)
    cutter._tokenizer = counting
    cutter.cut(piece * (1_000_000 // len(piece)), 256)
    assert counting.characters < 100_000


@pytest.mark.parametrize("spaces", [5_000, 100_000])
@pytest.mark.parametrize("kind", ["bytes", "regex", "characters"])
def test_spaces_that_a_special_token_takes_are_not_taken_for_tokens(kind: str, spaces: int) -> None:
    """`<mask>` takes the spaces before it, however many they are."""
    found = subject(kind, 8, "right").difference("the" + " " * spaces + "<mask>" + WORDS * 20)
    assert found is None


@pytest.mark.parametrize("piece", ["\u0e2a\u0e33", "\u200b", "\u0301", "\U0001f1e9\U0001f1ea"])
def test_without_a_normalizer_no_character_depends_on_its_neighbours(piece: str) -> None:
    cutter = TextTruncator(KINDS["bytes"]())
    text = piece * (1_000_000 // len(piece))
    part = cutter.cut(text, 256)
    assert len(part) < 10_000
    assert cutter.ids(part)[:256] == cutter.ids(text)[:256]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("room", [100, 101])
@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_two_long_texts_are_cut_as_the_tokenizer_cuts_them(kind: str, room: int, side: Any) -> None:
    pair = subject(kind, room, side, "pair")
    for first, second in ((1_000, 700), (700, 1_000), (700, 700)):
        assert pair.difference(("\u6c34 " * first, "\u6f22 " * second)) is None


def test_a_pair_of_very_long_texts_takes_no_more_memory_than_the_texts() -> None:
    """The tokenizer itself would make 14,000 combinations of what it cuts off."""
    tokens = Subject("wordpiece", 256, "right", "pair").tokens
    counting: Any = Counting(tokens._tokenizer)
    tokens._tokenizer = counting
    [found] = tokens.prepare([("\u6c34" * 30_000, "\u6f22" * 30_000)])
    assert counting.characters == 0
    assert isinstance(found, Prepared)
    assert found.cost == 256
    assert found.truncated


def test_two_long_texts_are_cut_for_a_tokenizer_that_pads_to_a_length(tmp_path: Path) -> None:
    """Many tokenizer.json files pad each text to the length of the training."""
    from tests.small_models import text_model

    words = AutoTokenizer.from_pretrained(str(text_model(tmp_path)))
    words.backend_tokenizer.enable_padding(length=64)
    tokens = TextTokens(words, 64, "truncate", takes="pair")
    [found] = tokens.prepare([("mill " * 400, "canal " * 400)])
    assert isinstance(found, Prepared)
    assert found.cost == found.payload.shape[1] == 64
    assert 0 not in found.payload[0]  # no padding


def test_where_the_tokens_are_few_the_whole_text_is_taken() -> None:
    cutter = TextTruncator(KINDS["whole-text"]())
    text = "\u0301" * 5_000
    assert cutter.cut(text, 300) == text


def test_a_text_without_a_token_is_refused() -> None:
    tokenizer = KINDS["bytes"]()
    tokenizer.post_processor = None
    bare = SimpleNamespace(
        backend_tokenizer=tokenizer,
        truncation_side="right",
        pad_token_id=0,
        model_input_names=["input_ids"],
        num_special_tokens_to_add=lambda pair=False: 0,
    )
    refused, taken = TextTokens(bare, 20, "truncate").prepare(["", "a"])
    assert isinstance(refused, RecordError)
    assert "has no tokens for this model" in str(refused)
    assert isinstance(taken, Prepared)
