"""Tokens of texts from the tokens of their words are those that the tokenizer gives."""

import itertools
import pickle
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from headrace.engines.model_folder import find_folder
from headrace.engines.text import word_tokens as module
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.tokenizing import TextTokens
from headrace.engines.text.truncation import TextTruncator
from headrace.engines.text.word_tokens import WordTokens, word_tokens

ODD = [
    *map(chr, range(0x250)), *map(chr, range(0x2000, 0x2070)),
    "\u0301", "\u0338", "\u3000", "\u1fef", "\u037e", "\ufffd",
    "[CLS]", "[MASK]", "[ SEP ]", "[sep]", "x" * 100, "x" * 101, "a" * 40, "中", "あ", "한",
]  # fmt: skip
USUAL = list("abcdefghijklmnopqrstuvwxyzABCDEF0123456789.,'-_!?()      \n\t")


def bert(*, lowercase: bool = True, clean: bool = True) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(find_folder(None) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=clean, lowercase=lowercase)
    return tokenizer


def of(tokenizer: Tokenizer, length: int = 256, side: module.Side = "right") -> WordTokens:
    found = word_tokens(tokenizer, TextTruncator(tokenizer).ids, length, side)
    assert found is not None
    return found


def texts(count: int) -> list[str]:
    dice = random.Random(5)
    letters = ODD + USUAL * 30
    return ["".join(dice.choices(letters, k=dice.randrange(60))) for _ in range(count)]


def listed(found: list[bytes]) -> list[list[int]]:
    return [array("i", one).tolist() for one in found]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [256, 9])
def test_the_tokens_are_those_of_the_tokenizer(lowercase: bool, clean: bool, side: module.Side, length: int) -> None:
    tokenizer = bert(lowercase=lowercase, clean=clean)
    by_word = of(tokenizer, length, side)
    tokenizer.enable_truncation(length, direction=side)
    given = texts(600)
    found, cut, left = by_word.of(given)
    encodings = tokenizer.encode_batch_fast(given)
    taken = [row for row in range(len(given)) if row not in set(left)]
    assert len(taken) > len(given) // 8
    assert [listed(found)[row] for row in taken] == [encodings[row].ids for row in taken]
    assert [cut[row] for row in taken] == [bool(encodings[row].overflowing) for row in taken]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [256, 9])
def test_a_column_has_the_tokens_of_its_texts(side: module.Side, length: int) -> None:
    by_word, dice = of(bert(), length, side), random.Random(7)
    given = ["", " \t", *("".join(dice.choices(USUAL, k=dice.randrange(80))) for _ in range(600))]
    for column in (
        pa.array(["odd", "ones", *given, "\x7f"]).slice(2, len(given)),
        pa.array(["", "", "na\u00efve b\xa0c"]),
    ):
        assert not len(by_word.odd_rows(column))
        found, cut, left = by_word.of(column.to_pylist())
        assert not left
        ids, bounds, were_cut = by_word.of_column(column)
        assert [ids[start:stop].tolist() for start, stop in itertools.pairwise(bounds.tolist())] == listed(found)
        assert were_cut.tolist() == cut
    assert by_word.odd_rows(pa.array(["a[MA", "SK]b", "a[MASK]b", "na\u00efve", "a\x0bb", "\x7f"])).tolist() == [
        2,
        4,
        5,
    ]


def test_single_texts_too_have_the_tokens_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, given = bert(), texts(600)
    words = SimpleNamespace(
        backend_tokenizer=tokenizer,
        truncation_side="right",
        pad_token_id=0,
        model_input_names=["input_ids"],
        num_special_tokens_to_add=lambda pair=False: 3 if pair else 2,
    )
    tokens: Any = TextTokens(words, 9, LongTexts())  # type: ignore[arg-type]
    tokenizer.enable_truncation(9)
    asked: list[str] = []
    of = WordTokens.of
    monkeypatch.setattr(WordTokens, "of", lambda self, texts: asked.extend(texts) or of(self, texts))
    for text, expected in zip(given, tokenizer.encode_batch_fast(given), strict=True):
        [one] = tokens.prepare([text])
        assert one.payload.tolist() == [expected.ids]
        assert (one.cost, one.truncated) == (len(expected.ids), bool(expected.overflowing))
    assert asked == given
    asked.clear()
    by_word, odd = word_tokens(tokenizer, TextTruncator(tokenizer).ids, 9, "right"), ["[MASK]", "\x7f\x7f"]
    assert by_word is not None
    usual = np.delete(np.array(given, object), by_word.odd_rows(pa.array(given))).tolist()
    for some in (usual, [odd[0], *usual, odd[1]]):
        column = tokens.prepare_column(pa.array(some)).payloads
        assert [column[row].tolist() for row in range(len(some))] == [[one.ids] for one in tokenizer.encode_batch(some)]
    assert asked == odd


def test_texts_that_may_be_read_otherwise_are_left_to_the_tokenizer() -> None:
    given = ["plain", "a\x0bb", "a[MASK]b", "中文", "naïve", "zero\u200bwidth", ""]
    assert of(bert()).of(given)[2] == [1, 2, 3, 5]


def test_words_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = bert(), []

    def ids(text: str) -> list[int]:
        asked.append(text)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    by_word = word_tokens(tokenizer, ids, 256, "right")
    assert by_word is not None
    asked.clear()
    expected = listed(by_word.of(["the cat, the mat"])[0])
    assert asked == ["the", "cat", ",", "mat"]
    assert listed(by_word.of(["the cat, the mat"])[0]) == expected
    assert len(asked) == 4
    monkeypatch.setattr(module, "_MOST_KEPT", 2)  # it forgets, and computes again
    assert listed(by_word.of([" ".join(map(str, range(50))), "the cat, the mat"])[0])[1:] == expected
    assert len(asked) > 54
    assert listed(by_word.of(["y" * 33] * 2)[0]) == [tokenizer.encode("y" * 33).ids] * 2
    assert asked.count("y" * 33) == 2  # too long to be kept


def test_a_copy_for_another_process_gives_the_same() -> None:
    by_word = of(bert())
    assert pickle.loads(pickle.dumps(by_word)).of(["the cat"]) == by_word.of(["the cat"])


def test_other_tokenizers_are_not_read_by_word() -> None:
    def found(tokenizer: Tokenizer) -> WordTokens | None:
        return word_tokens(tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 256, "right")

    assert found(bert()) is not None
    for change in (
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"model": WordPiece({"[UNK]": 0})},
    ):
        tokenizer = bert()
        for name, part in change.items():
            setattr(tokenizer, name, part)
        assert (found(tokenizer) is None) == ("model" not in change)
    tokenizer = bert()
    tokenizer.add_tokens(["headrace"])  # found in normalized texts, too
    assert found(tokenizer) is None
