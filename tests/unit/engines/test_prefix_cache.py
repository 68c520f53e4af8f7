"""Pages that requests share: the right tokens in each, none lost, the least recently used given away first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.generation.prefix_cache import PrefixCache

PAGE = 2


class Machine:
    """A cache with requests that compute their tokens a few at a time, and a memory that shows what is stored."""

    def __init__(self, pages: int, share: bool = True) -> None:
        self.cache = PrefixCache(range(pages), PAGE, share)
        self.pages = pages
        self.stored: dict[int, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}
        self.computed = 0

    def start(self, name: str, tokens: list[int]) -> int | None:
        found = self.cache.start(name, tokens)
        if found is not None:
            assert found < len(tokens)
            self.tokens[name], self.known[name] = tokens, found
        return found

    def compute(self, name: str, count: int) -> bool:
        """The request reads so many more of its tokens, if there are pages for them."""
        tokens = self.tokens[name]
        end = min(self.known[name] + count, len(tokens))
        if not self.cache.grow(name, end):
            return False
        table = self.cache.tables[name]
        for place in range(self.known[name], end):
            self.stored.setdefault(table[place // PAGE], [-1] * PAGE)[place % PAGE] = tokens[place]
        self.computed += end - self.known[name]
        self.known[name] = end
        self.cache.computed(name, tokens, end)
        return True

    def release(self, name: str) -> None:
        self.cache.release(name)
        del self.tokens[name], self.known[name]

    def run(self, name: str, tokens: list[int]) -> int:
        """The whole life of a request; how many tokens it found."""
        found = self.start(name, tokens)
        assert found is not None
        assert self.compute(name, len(tokens))
        self.release(name)
        return found

    def check(self) -> None:
        held: set[int] = set()
        for name, table in self.cache.tables.items():
            tokens, known = self.tokens[name], self.known[name]
            assert [token for page in table for token in self.stored.get(page, [-1] * PAGE)][:known] == tokens[:known]
            held.update(table)
        assert self.cache.available == self.pages - len(held)
        # Each page counts for one request, whoever shares it.
        pages = sum(map(len, self.cache.tables.values()))
        assert pages * PAGE - sum(self.cache.shared(name) for name in self.tokens) == len(held) * PAGE


trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=12)
steps = st.lists(st.tuples(st.sampled_from(["start", "compute", "grow", "release"]), st.integers(0, 11)), max_size=120)


@settings(max_examples=300, deadline=None)
@given(prompts=trees, steps=steps, pages=st.integers(5, 16), share=st.booleans())
def test_whatever_happens_each_request_reads_its_own_tokens(
    prompts: list[list[int]], steps: list[tuple[str, int]], pages: int, share: bool
) -> None:
    machine = Machine(pages, share)
    for does, which in steps:
        name = str(which % len(prompts))
        running = name in machine.tokens
        if does == "start" and not running:
            machine.start(name, list(prompts[int(name)]))
        elif does == "compute" and running:
            machine.compute(name, 3)
        elif does == "grow" and running and machine.known[name] == len(machine.tokens[name]):
            machine.tokens[name].append(which % 2)  # it generates
            machine.compute(name, 1)
        elif does == "release" and running:
            machine.release(name)
        machine.check()
    for name in list(machine.tokens):
        machine.release(name)
    assert machine.cache.available == pages


@settings(max_examples=100, deadline=None)
@given(prompts=trees)
def test_with_room_for_all_each_full_page_is_computed_once(prompts: list[list[int]]) -> None:
    machine = Machine(100)
    waiting = {str(number): prompt for number, prompt in enumerate(prompts)}
    while waiting or machine.tokens:
        for name, prompt in list(waiting.items()):
            if machine.start(name, prompt) is not None:
                del waiting[name]
        for name in list(machine.tokens):
            machine.compute(name, PAGE)
            if machine.known[name] == len(machine.tokens[name]):
                machine.release(name)
    known: set[tuple[int, ...]] = set()
    least = 0
    for prompt in prompts:
        full = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        least += len(prompt) - PAGE * sum(one in known for one in full)
        known.update(full)
    assert machine.computed <= least


def test_a_request_waits_while_another_computes_its_next_page() -> None:
    machine = Machine(9)
    machine.start("first", [1, 2, 3, 4, 5])
    assert machine.cache.start("second", [1, 2, 3, 4, 6]) is None
    machine.compute("first", 2)
    assert machine.cache.start("second", [1, 2, 3, 4, 6]) is None  # half of it is ready
    assert machine.start("other", [1, 2, 7]) == 2
    machine.compute("first", 2)
    assert machine.start("second", [1, 2, 3, 4, 6]) == 4
    assert machine.cache.shared("second") == 4
    assert machine.cache.shared("first") == 0
    machine.release("first")
    assert machine.cache.shared("second") == 2  # the other has it too, and came before
    assert machine.cache.held([1, 2, 3, 4, 5]) == 4


def test_when_a_request_leaves_early_the_next_computes_its_pages() -> None:
    machine = Machine(9)
    machine.start("first", [1, 2, 3, 4, 5])
    machine.compute("first", 2)
    machine.release("first")
    assert machine.start("second", [1, 2, 3, 4, 6]) == 2
    assert machine.cache.available == 8


def test_the_page_that_was_used_longest_ago_goes_first_and_children_before_parents() -> None:
    machine = Machine(5)
    machine.run("a", [1, 1, 1, 1, 1])  # two full pages
    machine.run("b", [2, 2, 2])
    machine.run("c", [1, 1, 9])  # uses a's first page again
    machine.start("big", [7] * 6)
    machine.compute("big", 6)  # takes two free pages, and a's second
    machine.release("big")
    assert machine.start("a", [1, 1, 1, 1, 1]) == 2
    assert machine.start("b", [2, 2, 2]) == 2


def test_without_sharing_nothing_is_kept() -> None:
    machine = Machine(5, share=False)
    assert machine.run("a", [1, 1, 1]) == 0
    assert machine.run("b", [1, 1, 1]) == 0
    assert machine.cache.held([1, 1, 1]) == 0


@pytest.mark.parametrize("count", [10_000])
def test_an_unknown_request_has_no_pages(count: int) -> None:
    cache: Any = PrefixCache(range(count), 32, share=True)
    cache.release("nobody")
    assert (cache.shared("nobody"), cache.available) == (0, count)
