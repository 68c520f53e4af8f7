from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.jobs.pipeline.prefixes import common_length, prefix_order, prompt_text, sharing

TEXTS = st.lists(st.lists(st.sampled_from("ab"), max_size=8).map("".join), max_size=30)


@settings(deadline=None)
@given(TEXTS)
def test_the_order_is_a_permutation_in_which_all_that_begin_alike_are_neighbours(stems: list[str]) -> None:
    prompts = ["".join(letter * 80 for letter in stem) for stem in stems]
    order = prefix_order(prompts)
    assert sorted(order) == list(range(len(prompts)))
    for prefix in {prompt[:length] for prompt in prompts for length in range(80, len(prompt) + 1, 80)}:
        places = [place for place, number in enumerate(order) if prompts[number].startswith(prefix)]
        assert places == list(range(places[0], places[-1] + 1))


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(2, 8), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_cache_for_one_group_reads_each_prefix_about_once(
    documents: int, questions: int, header: int, dice: random.Random
) -> None:
    page = 16
    prompts = [
        "h" * (header * 64) + f"{document:04d}" + f"{document} of them " * 40 + f"question {question:02d}"
        for document in range(documents)
        for question in range(questions)
    ]
    dice.shuffle(prompts)
    room = max(map(len, prompts)) // page + 2  # pages: one prompt and a little more
    least = pages_read(prompts, page, 10**9)
    assert pages_read([prompts[number] for number in prefix_order(prompts)], page, room) <= 1.1 * least


def pages_read(prompts: Sequence[str], page: int, room: int) -> int:
    """Pages that a cache of `room` pages, the least recently used evicted, has to read."""
    cache: OrderedDict[str, None] = OrderedDict()
    read = 0
    for prompt in prompts:
        for end in range(page, len(prompt) + 1, page):
            read += prompt[:end] not in cache
            cache[prompt[:end]] = None
            cache.move_to_end(prompt[:end])
            if len(cache) > room:
                cache.popitem(last=False)
    return read


def test_the_group_with_the_longest_prompt_goes_first() -> None:
    prompts = ["b" * 70, "a" * 100, "c" * 300, "b" * 200]
    assert [prompts[number][0] for number in prefix_order(prompts)] == ["c", "b", "b", "a"]


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_common_length_is_that_of_the_common_beginning(one: str, other: str) -> None:
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one) == len(other)


def test_sharing_tells_an_order_that_gains_from_one_that_does_not() -> None:
    documents = ["x" * 100 + "1", "y" * 100 + "1", "x" * 100 + "2", "y" * 100 + "2"]
    found = sharing(documents, prefix_order(documents))
    assert found.as_read == 0.0
    assert found.sorted == 200 / 404
    assert found.gains
    grouped = sorted(documents)
    assert not sharing(grouped, prefix_order(grouped)).gains
    header = [f"{'h' * 100}{number * 7919 % 100:02d}" for number in range(100)]
    assert not sharing(header, prefix_order(header)).gains, "each order reads a header once"
    assert not sharing([], []).gains


def test_the_text_of_a_chat_begins_as_its_messages_do() -> None:
    system = {"role": "system", "content": "s"}
    one, two = ([system, {"role": "user", "content": text}] for text in ("u1", "u2"))
    assert common_length(prompt_text(one), prompt_text(two)) == len("system\0s\0user\0u")
    body = {"model": "m", "temperature": 0, "messages": one}
    assert prompt_text(body) == prompt_text(one)
    assert prompt_text(body | {"tools": [{"name": "t"}]}).startswith('[{"name": "t"}]')
    assert prompt_text({"prompt": "p"}) == prompt_text("p") == "p"
    assert prompt_text([1, 2]) != prompt_text([12])
    assert isinstance(prompt_text({1: object()}), str)


def windows_gain(documents: int, questions: int, window: int) -> bool:
    """Whether a window of shuffled prompts says that sorting all of them is worth more."""
    prompts = [f"{document:064d} of them" + f"question {n}" for document in range(documents) for n in range(questions)]
    random.Random(documents).shuffle(prompts)
    some = prompts[:window]
    return sharing(some, prefix_order(some)).gains_beyond(window / len(prompts))


def test_a_window_tells_whether_prompts_begin_alike_far_apart() -> None:
    assert windows_gain(3_000, 2, 600), "one in ten of its documents comes twice, and all others elsewhere"
    assert windows_gain(400, 16, 600)
    assert not windows_gain(4, 1_000, 600), "a window reads each of the four once: that is little"
    assert not windows_gain(3_000, 1, 600)
    assert not windows_gain(300, 2, 600), "these are all prompts"
