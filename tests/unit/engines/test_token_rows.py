"""A block of texts has the tokens, costs and errors of the single texts, and a batch of it the same arrays."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any, Literal

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.fuzz_cutting import KINDS, PIECES, Subject

from headrace.engines.base import PromptedText, TokenIds
from headrace.engines.text.prompts import Prompts
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.token_rows import TokenRows, Tokens, offsets_of
from headrace.engines.text.tokenizing import TOKEN_PLACES, TextTokens

PLAIN = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join)
LONG = st.tuples(st.sampled_from(PIECES), st.sampled_from((40, 700, 3_000))).map(lambda run: run[0] * run[1])
REFUSED = st.sampled_from([None, 7, "half \ud800", b"mill", ["a"], float("nan")])
TEXTS = st.lists(PLAIN | LONG | REFUSED, max_size=12)
OWN = st.builds(PromptedText, PLAIN, st.sampled_from(["query", "none such"])) | st.builds(
    TokenIds, st.lists(st.integers(-1, 40), max_size=20).map(tuple)
)
PAIRS = st.lists(st.tuples(PLAIN | LONG | REFUSED, PLAIN) | REFUSED, max_size=8)
NAMES = frozenset({"input_ids", "attention_mask", "token_type_ids"})
ROOM = 11


@cache
def tokens_of(kind: str, takes: Any, on_too_long: Any = "truncate", prompt: str = "") -> TextTokens:
    words, room, _ = Subject(kind, ROOM, takes=takes)._settings
    prompts = Prompts(prompt, {"query": "query: "})
    return TextTokens(words, room, LongTexts(on_too_long), takes=takes, prompts=prompts)


def assert_the_same(tokens: TextTokens, values: list[Any], column: Any = None) -> None:
    one_by_one = [tokens.prepare([value])[0] for value in values]
    found = tokens.prepare_column(values if column is None else column)
    assert len(found.payloads) == len(found.costs) == len(values)
    assert found.truncated == sum(getattr(one, "truncated", False) for one in one_by_one)
    for row, one in enumerate(one_by_one):
        if isinstance(one, Exception):
            assert repr(found.errors[row]) == repr(one)
            assert found.costs[row] == 0
        else:
            assert row not in found.errors
            assert found.costs[row] == one.cost
            np.testing.assert_array_equal(found.payloads[row], one.payload, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_too_long", ["truncate", "error"])
@given(values=TEXTS)
@settings(max_examples=12, deadline=None)
def test_a_column_has_what_each_text_has(kind: str, on_too_long: str, values: list[Any]) -> None:
    assert_the_same(tokens_of(kind, "either", on_too_long), values)


@pytest.mark.parametrize("prompt", ["", "passage: ", "水 "])
@given(values=st.lists(PLAIN | LONG | REFUSED | OWN, max_size=12))
@settings(max_examples=40, deadline=None)
def test_with_prompts_and_ids_too(prompt: str, values: list[Any]) -> None:
    assert_the_same(tokens_of("wordpiece", "text", prompt=prompt), values)


@pytest.mark.parametrize("takes", ["either", "pair"])
@given(values=PAIRS)
@settings(max_examples=25, deadline=None)
def test_pairs_have_their_types(takes: str, values: list[Any]) -> None:
    assert_the_same(tokens_of("wordpiece", takes), values)


@pytest.mark.parametrize("kind", [arrow.string(), arrow.large_string(), arrow.string_view()], ids=str)
@given(values=st.lists(PLAIN | LONG | st.none(), max_size=12), cut=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_column_of_arrow_is_one_of_texts(kind: Any, values: list[Any], cut: int) -> None:
    assert_the_same(tokens_of("bytes", "text"), values[cut:], arrow.array(values, kind)[cut:])


def test_a_long_column_is_encoded_in_pieces() -> None:
    words = ["the mill", "", "a canal " * 30, "水車 naïve", "wheel"]
    assert_the_same(tokens_of("bytes", "text"), words * 500)


def test_single_texts_types_are_not_forgotten() -> None:
    """XLNet's classification token has a type of its own."""
    tokens = tokens_of("wordpiece", "either")
    typed = pickle.loads(pickle.dumps(tokens._tokenizer))
    from tokenizers.processors import TemplateProcessing

    typed.post_processor = TemplateProcessing("$A:0 <mask>:2", "$A:0 $B:1 <mask>:2", [("<mask>", 3)])
    words = Subject("wordpiece", ROOM)._settings[0]
    words.backend_tokenizer = typed
    again = TextTokens(words, ROOM, LongTexts(), takes="either")
    assert again.prepare(["a mill"])[0].payload[1].tolist()[-1] == 2  # type: ignore[union-attr]
    assert_the_same(again, ["a mill", "the", "", ("a", "mill")])


# Of texts with any tokens, some with an attention row.

SINGLE = st.lists(st.integers(0, 99), min_size=1, max_size=9).flatmap(
    lambda ids: st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)).map(
        lambda marks: (np.array([ids], np.int32), np.array([ids, marks], np.int32))
    )
)
ROWS = st.lists(st.tuples(SINGLE, st.booleans()).map(lambda one: one[0][one[1]]), min_size=1, max_size=9)


@given(texts=ROWS, data=st.data())
def test_texts_are_taken_and_joined(texts: list[Tokens], data: Any) -> None:
    rows = TokenRows.of(texts, 1)
    assert rows.nbytes >= sum(text[0].nbytes for text in texts)
    wanted = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=12))
    cut = data.draw(st.integers(0, len(wanted)))
    pieces = [rows.take(np.array(some, np.intp)) for some in (wanted[:cut], wanted[cut:])]
    for found in (TokenRows.joined(pieces), rows.take(np.array(wanted, np.intp))):
        assert len(found) == len(wanted)
        assert found.offsets.tolist() == offsets_of([texts[row].shape[1] for row in wanted]).tolist()
        for place, row in enumerate(wanted):
            np.testing.assert_array_equal(found[place], texts[row], strict=True)


def padded(texts: list[Tokens], side: str, longest: int) -> dict[str, Any]:
    """The arrays, text by text."""
    arrays = {name: np.zeros((len(texts), longest), np.int64) for name in NAMES}
    for row, text in enumerate(texts):
        count = text.shape[1]
        real = slice(0, count) if side == "right" else slice(longest - count, longest)
        arrays["input_ids"][row, real] = text[0]
        arrays["attention_mask"][row, real] = text[-1] if len(text) > 1 else 1
    return arrays


@pytest.mark.parametrize("side", ["right", "left"])
@given(texts=ROWS, more=st.integers(0, 3))
@settings(deadline=None)
def test_a_batch_is_padded_on_a_side(side: Literal["right", "left"], texts: list[Tokens], more: int) -> None:
    tokens = tokens_of("bytes", "text")
    longest = max(text.shape[1] for text in texts) + more
    found = tokens.collate(tokens.rows_of(texts), NAMES, side, longest)
    expected = padded(texts, side, longest)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    (places,) = tokens.collate(tokens.rows_of(texts), frozenset({TOKEN_PLACES}), side, longest).values()
    assert found["input_ids"].ravel()[places].tolist() == [number for text in texts for number in text[0].tolist()]
    assert tokens.collate(tokens.rows_of(texts), frozenset({"input_ids"}), side).keys() == {"input_ids"}


@given(texts=ROWS, filling=st.integers(0, 5))
@settings(deadline=None)
def test_a_row_has_the_tokens_of_all_texts_and_counts_from_each(texts: list[Tokens], filling: int) -> None:
    rows = TokenRows.of([text[:1] for text in texts], 1)
    ids = [number for text in texts for number in text[0].tolist()]
    found = tokens_of("bytes", "text").packed(rows, NAMES, len(ids) + filling)
    assert found["input_ids"].tolist() == ids + ids[:1] * filling
    assert found["position_ids"][: len(ids)].tolist() == [at for text in texts for at in range(text.shape[1])]
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}
    assert {len(array) for array in found.values()} == {len(ids) + filling}
