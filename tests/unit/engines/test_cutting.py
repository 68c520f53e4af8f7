"""A text that is shortened before it is encoded has the tokens of the whole one, whatever the tokenizer."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripts.fuzz_cutting import KINDS, LONGEST_OF_PAIR, PIECES, Subject
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer, Strip
from tokenizers.pre_tokenizers import BertPreTokenizer, Metaspace
from transformers import AutoTokenizer

from headrace.engines.base import Chunks, Prepared
from headrace.engines.text.splitting import LongTexts
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


@pytest.mark.parametrize("letters", [280, 281])
def test_a_prefix_is_not_judged_without_the_spaces_at_its_end(letters: int) -> None:
    """Without them, each other letter starts a token: `a aa aa`, with them `aa aa a▁`."""
    vocabulary = [("<unk>", -10.0), ("a", -1.0), ("aa", -1.5), ("a▁", -1.0), ("▁", -1.0), ("b", -1.0), ("▁b", -1.0)]
    tokenizer = Tokenizer(Unigram(vocabulary, 0))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Strip(), Metaspace(split=False, prepend_scheme="never")
    cutter = TextTruncator(tokenizer)
    text = "a" * letters + " " * 300 + "b" * 5_000
    assert cutter.ids(cutter.cut(text, 20))[:20] == cutter.ids(text)[:20]


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
    tokens = TextTokens(words, 64, LongTexts(), takes="pair")
    [found] = tokens.prepare([("mill " * 400, "canal " * 400)])
    assert isinstance(found, Prepared)
    assert found.cost == found.payload.shape[1] == 64
    assert 0 not in found.payload[0]  # no padding


@pytest.mark.parametrize("kind", KINDS)
@given(runs=st.lists(RUNS, min_size=4, max_size=12), seed=st.integers(0, 9))
@example(runs=[("a", 1), ("a", 2), ("a", 2), (" the", 2)], seed=2)  # two divisions with equal scores
@example(runs=[("198", 1_000), ("7", 40), ("1987", 20)], seed=2)  # digits by threes, from another start
@example(runs=[("e", 1), ("\u0323\u0301", 1_200)], seed=2)  # normalization sorts them
@settings(max_examples=10, deadline=None)
def test_a_text_in_pieces_has_the_tokens_of_the_whole_one(kind: str, runs: list[tuple[str, int]], seed: int) -> None:
    words = random.Random(seed).choices(WORDS.split(), k=2_000)
    text = " ".join(words[:900]) + "".join(piece * count for piece, count in runs)[:6_000] + " ".join(words[900:])
    cutter = subject(kind, 13, "right").tokens._cutter
    assert cutter.all_ids(text, piece=4_096).tolist() == cutter.ids(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_chunks_of_a_text_have_all_its_tokens_and_each_has_the_prompt(kind: str) -> None:
    text = " ".join(random.Random(1).choices([*WORDS.split(), "\u6c34\u8eca,", "1987"], k=120))
    tokens = subject(kind, 20, "right", "text").split(chunk_overlap=3)
    whole = tokens._cutter.ids("query: " + text)
    prompt = tokens._cutter.count_before("query: " + text, len("query: "))
    [prepared] = tokens.prepare([text])
    assert isinstance(prepared, Prepared)
    assert isinstance(prepared.payload, Chunks)
    ids, step = [part.payload[0].tolist() for part in prepared.payload.parts], 18 - prompt - 3
    room = 18 - prompt
    assert ids[0][1:-1] == whole[:18]
    assert [len(part) for part in ids[:-1]] == [20] * (len(ids) - 1)
    assert all(part[1 : 1 + prompt] == whole[:prompt] for part in ids)
    for number, part in enumerate(ids):
        assert part[1 + prompt : -1] == whole[prompt:][number * step : number * step + room]
    assert prepared.cost == sum(map(len, ids)) == sum(prepared.payload.costs)
    assert list(prepared.payload.weights) == [len(part) - 2 - prompt for part in ids]
    assert sum(prepared.payload.weights) == len(whole) - prompt + 3 * (len(ids) - 1)


def test_the_longer_text_of_a_pair_is_split_and_the_shorter_one_is_in_each_chunk() -> None:
    tokens = subject("wordpiece", 20, "right", "pair").split()
    short, long = tokens._cutter.ids("the mill"), tokens._cutter.ids(WORDS * 4)
    for pair, kinds in ((("the mill", WORDS * 4), (short, long)), ((WORDS * 4, "the mill"), (long, short))):
        [prepared] = tokens.prepare([pair])
        assert isinstance(prepared, Prepared)
        assert isinstance(prepared.payload, Chunks)
        found: list[int] = []
        for part in prepared.payload.parts:
            one, other = ([int(n) for n in part.payload[0][part.payload[1] == kind]] for kind in (0, 1))
            repeated, chunk = (one[1:-1], other[:-1]) if kinds[0] is short else (other[:-1], one[1:-1])
            assert repeated == short
            found += chunk
        assert found == long
    [refused] = tokens.prepare([(WORDS * 4, WORDS * 4)])
    assert "cannot be split" in str(refused)


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
    refused, taken = TextTokens(bare, 20, LongTexts()).prepare(["", "a"])
    assert isinstance(refused, RecordError)
    assert "has no tokens for this model" in str(refused)
    assert isinstance(taken, Prepared)
