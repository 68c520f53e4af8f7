"""Mixed requests to a real generator: each greedy answer is the one that it has alone; see scripts/fuzz_serving.py."""

from __future__ import annotations

import itertools

import pytest
from scripts.fuzz_serving import fuzz

from headrace.engines.generation.prefix_cache import PrefixCache

FEW = {"max_num_seqs": 4, "kv_cache_tokens": 576}
"""Room for few, so that answers are sent back and pages change hands."""


@pytest.mark.parametrize(("requests", "at_once"), [(150, 12), (50, 2)])
def test_greedy_answers_are_those_alone_whatever_is_asked_beside_them(requests: int, at_once: int) -> None:
    done = fuzz(requests, seed=at_once, different=30, at_once=at_once, **FEW)
    assert not done.wrong
    assert len(done.counts) >= 8


def test_a_page_that_is_given_to_two_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices when answers write over each other."""
    grow, calls = PrefixCache.grow, itertools.count()

    def twice(self: PrefixCache, request: str, tokens: int) -> bool:
        done, table = grow(self, request, tokens), self.tables[request]
        if next(calls) > 100 and done and table[-1] not in self._free:  # after the model is loaded and tried
            self._free.append(table[-1])
        return done

    monkeypatch.setattr(PrefixCache, "grow", twice)
    assert fuzz(40, seed=1, different=30, at_once=12, **FEW).wrong
