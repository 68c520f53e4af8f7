"""Prompts that are too long: split, asked in chunks, and their answers made one."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest

from headrace.engines.base import Chunks, Prepared
from headrace.engines.generation.options import Generation
from headrace.engines.requests.generation import GeneratedText
from headrace.engines.requests.long_prompts import LongPrompts, PromptSplitter
from headrace.engines.requests.templates import FilledTemplate
from headrace.errors import ConfigError, RecordError

REDUCE: dict[str, Any] = {"on_too_long": "split", "reduce_template": "{question} from {answers}"}
FIRST: dict[str, Any] = {"on_too_long": "split", "chunk_join": "first"}


class Words:
    """A model whose tokens are words, with a context of 20 and answers of 8."""

    def count(self, request: Any) -> int:
        return len(self.text(request).split())

    def __init__(self) -> None:
        self.places: list[Any] = []

    def whole(self, request: Any, place: Any) -> Prepared[Any]:
        self.places.append(place)
        return Prepared(self.text(request), self.count(request), greedy=True)

    def room(self, _: Any) -> int:
        return 12

    def text(self, request: Any) -> str:
        if isinstance(request, dict):
            return self.text(request.get("messages", request.get("prompt")))
        if isinstance(request, list):
            return " ".join(str(message["content"]) for message in request)
        return str(request)


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


def answer(text: str) -> GeneratedText:
    return {"text": text, "finish_reason": "stop", "prompt_tokens": 10, "completion_tokens": 1}


def chunks_of(request: Any, **rules: Any) -> Chunks[str]:
    payload = PromptSplitter(LongPrompts(**rules), Words()).prepare(request, None).payload
    assert isinstance(payload, Chunks)
    return payload


def joined(chunks: Chunks[str], *texts: str) -> Any:
    return chunks.join([answer(text) for text in texts], chunks.weights)


def test_a_short_prompt_is_not_split() -> None:
    prepared = PromptSplitter(LongPrompts(**REDUCE), Words()).prepare(words(12), None)
    assert prepared == Prepared(words(12), 12, greedy=True)


def test_chunks_hold_the_whole_text_and_the_rest_of_the_template() -> None:
    long = FilledTemplate("{question}: {text} end", {"question": "why", "text": words(1000)})
    found = [part.split() for part in chunks_of(pickle.loads(pickle.dumps(long)), **REDUCE).parts]
    assert {(part[0], part[-1]) for part in found} == {("why:", "end")}
    assert max(map(len, found)) == 12
    assert [word for part in found for word in part[1:-1]] == words(1000).split()


def test_neighbouring_chunks_overlap() -> None:
    found = [part.split() for part in chunks_of(words(100), **REDUCE, chunk_overlap=3).parts]
    for before, after in pairwise(found):
        assert 2 <= len(set(before) & set(after)) <= 4
        assert after[0] in before
    assert list(dict.fromkeys(word for part in found for word in part)) == words(100).split()


def test_characters_of_many_tokens_leave_no_room_to_overlap() -> None:
    """A chunk of one character must not be repeated for ever."""

    class Bytes(Words):
        def count(self, request: Any) -> int:
            return len(self.text(request).encode())

        def room(self, _: Any) -> int:
            return 5

    rules = LongPrompts(**FIRST, chunk_overlap=2)
    asked = PromptSplitter(rules, Bytes()).prepare("a" + "\N{WATER WAVE}" * 5 + "b" * 4, None).payload
    parts = []
    for _ in range(20):
        if not isinstance(asked, Chunks):
            break
        parts += asked.parts
        asked = joined(asked, "")
    assert not isinstance(asked, Chunks)
    assert parts[0].startswith("a") and parts[-1].endswith("b")
    assert "".join(parts).count("\N{WATER WAVE}") >= 5


@pytest.mark.parametrize(
    "request_",
    [
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": words(30)}],
        {"messages": [{"role": "user", "content": words(30)}], "max_tokens": 3},
        {"prompt": words(30), "max_tokens": 3},
    ],
)
def test_the_longest_text_of_a_request_is_split(request_: Any) -> None:
    chunks = chunks_of(request_, **{**REDUCE, "reduce_template": "sum {answers}"})
    assert all("w" in part for part in chunks.parts)
    last = joined(chunks, *("one" for _ in chunks.parts))
    kept = "be kind " if isinstance(request_, list) else ""
    assert last.parts == [f"{kept}sum " + "\n\n".join("one" for _ in chunks.parts)]


def test_the_answers_to_all_chunks_are_reduced_to_one() -> None:
    chunks = chunks_of(FilledTemplate("{question}: {text}", {"question": "why", "text": words(25)}), **REDUCE)
    assert len(chunks.parts) == 3
    last = joined(chunks, " a ", "b", "c")
    assert last.parts == ["why from a\n\nb\n\nc"]
    assert joined(last, "abc") == {**answer("abc"), "prompt_tokens": 40, "completion_tokens": 4}


def test_answers_that_are_too_long_together_are_reduced_in_chunks() -> None:
    chunks = chunks_of(FilledTemplate("{question}: {text}", {"question": "why", "text": words(88)}), **REDUCE)
    count = len(chunks.parts)
    second = joined(chunks, *(words(4, 10 * number) for number in range(count)))
    assert 4 * count / 10 <= len(second.parts) < count
    assert all(part.startswith("why from w") for part in second.parts)
    last = joined(second, *("a" for _ in second.parts))
    assert last.parts == ["why from " + "\n\n".join("a" for _ in second.parts)]
    assert joined(last, "e")["completion_tokens"] == count + len(second.parts) + 1
    with pytest.raises(RecordError, match="lower max_tokens"):
        joined(chunks, *(words(12) for _ in range(count)))


def test_the_first_chunk_that_answers_ends_the_questions() -> None:
    one = chunks_of(words(40), **FIRST, no_answer="Not found")
    assert (len(one.parts), one.later) == (1, 3)
    two = joined(one, " not found in this part.")
    assert two.parts[0].split()[0] == f"w{len(one.parts[0].split())}"
    assert joined(two, "42") == {**answer("42"), "prompt_tokens": 20, "completion_tokens": 2}
    four = joined(joined(two, "  "), "NOT FOUND")
    assert joined(four, "not found")["text"] == "not found"


@pytest.mark.parametrize(
    ("request_", "words_"),
    [
        (FilledTemplate("{a}" + " x" * 13, {"a": words(1)}), "13 tokens of it must be in each chunk|14 tokens"),
        ({"prompt": [1] * 30}, "it has no text"),
    ],
)
def test_a_prompt_that_cannot_be_split_is_refused(request_: Any, words_: str, monkeypatch: Any) -> None:
    if isinstance(request_, dict):
        monkeypatch.setattr(Words, "count", lambda *_: 30)
    with pytest.raises(RecordError, match=words_):
        PromptSplitter(LongPrompts(**REDUCE), Words()).prepare(request_, None)


@pytest.mark.parametrize(
    ("rules", "words_"),
    [
        ({"on_too_long": "truncate"}, "must be one of error, split or None"),
        ({"chunk_overlap": 3}, "no prompt is split"),
        ({"on_too_long": "split"}, "needs a reduce template with {answers}"),
        ({"on_too_long": "split", "reduce_template": "{text}"}, "needs a reduce template with {answers}"),
        ({**REDUCE, "no_answer": "none"}, "goes with chunk_join 'first'"),
        ({**REDUCE, "chunk_join": "first"}, "not 'first'"),
        ({**REDUCE, "chunk_join": "mean"}, "must be one of map-reduce, first or None"),
        ({**FIRST, "no_answer": " "}, "it must be a text"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], words_: str) -> None:
    with pytest.raises(ConfigError, match=words_):
        Generation(**rules).check()
