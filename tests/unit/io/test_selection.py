from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.in_columns import compared, in_tables, skipping

from headrace.errors import ConfigError
from headrace.io.base import Chunk, Source
from headrace.io.sources.in_memory import SequenceSource
from headrace.io.sources.opening import open_source
from headrace.io.sources.selection import SelectedSource, Selection, parse_shard
from headrace.io.storage.rows import todo
from headrace.records import Record

ROWS = [{"text": str(n)} for n in range(1500)]


def take(selection: Selection, done: frozenset[int] = frozenset(), rows: int = 1500) -> list[tuple[int, int]]:
    """(new position, place in the whole input) of every row that is given."""

    def next_todo(position: int) -> int:
        while position in done:
            position += 1
        return position

    chunks = SelectedSource(SequenceSource(ROWS[:rows]), selection).chunks(next_todo)
    return [(record.position, record.id) for chunk in chunks for record in chunk.records]


def test_a_shard_takes_every_nth_row_numbered_without_gaps() -> None:
    assert take(Selection(shard=(1, 4)), rows=10) == [(0, 1), (1, 5), (2, 9)]
    assert take(Selection(shard=(3, 4)), rows=3) == []


def test_a_limit_takes_the_first_and_reads_no_further() -> None:
    assert take(Selection(limit=2)) == [(0, 0), (1, 1)]
    read = 0

    class Counting(SequenceSource):
        def chunks(self, next_todo):  # type: ignore[no-untyped-def]
            nonlocal read
            for chunk in super().chunks(next_todo):
                read += 1
                yield chunk

    list(SelectedSource(Counting(ROWS), Selection(limit=100)).chunks(lambda position: position))
    assert read == 1


def test_a_sample_is_a_part_of_its_shard_and_of_larger_samples_seed_by_seed() -> None:
    small = {place for _, place in take(Selection(shard=(1, 2), sample=0.1))}
    assert 30 < len(small) < 130
    assert all(place % 2 == 1 for place in small)
    assert small < {place for _, place in take(Selection(shard=(1, 2), sample=0.5))}
    assert small != {place for _, place in take(Selection(shard=(1, 2), sample=0.1, sample_seed=1))}


@settings(max_examples=50)
@given(
    shard=st.none() | st.integers(1, 5).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
    sample=st.none() | st.sampled_from([0.05, 0.5, 1.0]),
    limit=st.none() | st.integers(1, 1600),
    done=st.frozensets(st.integers(0, 1500), max_size=40),
    stretch=st.tuples(st.integers(0, 1500), st.integers(0, 1500)),
)
def test_what_is_done_is_left_out_and_nothing_else(
    shard: tuple[int, int] | None,
    sample: float | None,
    limit: int | None,
    done: frozenset[int],
    stretch: tuple[int, int],
) -> None:
    selection = Selection(shard=shard, sample=sample, sample_seed=7, limit=limit)
    whole = take(selection)
    assert [position for position, _ in whole] == list(range(len(whole)))
    all_done = done | frozenset(range(*stretch))
    assert take(selection, all_done) == [pair for pair in whole if pair[0] not in all_done]


@pytest.mark.parametrize(
    ("selection", "total"),
    [
        (Selection(), 1500),
        (Selection(shard=(0, 7)), 215),
        (Selection(shard=(6, 7)), 214),
        (Selection(shard=(6, 7), limit=10), 10),
        (Selection(limit=2000), 1500),
        (Selection(sample=0.5), None),
    ],
)
def test_how_many_rows_are_taken_is_known_beforehand(selection: Selection, total: int | None) -> None:
    assert SelectedSource(SequenceSource(ROWS), selection).total_records == total
    assert total is None or len(take(selection)) == total


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "-1/2", "a/b", "1.0/2"])
def test_a_shard_is_two_numbers(text: str) -> None:
    assert parse_shard("0/4") == (0, 4)
    with pytest.raises(ConfigError, match="write i/n, such as 0/4"):
        parse_shard(text)


@pytest.mark.parametrize("limit", [1, 2, 40, 41, 99, 100, 101, None])
@pytest.mark.parametrize("done", [set(), {0}, {39, 40}, {98}, {99}, set(range(100)), set(range(0, 100, 2))])
def test_the_first_rows_come_in_columns(tmp_path: Path, limit: int | None, done: set[int]) -> None:
    file = tmp_path / "in.jsonl"
    lines = [f'{{"id": {n}, "text": "t"}}' if n % 20 else "no JSON" for n in range(100)]
    lines[41] = '{"id": 41, "text": 1}'
    file.write_text("\n".join(lines) + "\n")
    chunks = compared(SelectedSource(open_source(file), Selection(limit=limit)), ["id", "text"], skipping(done))
    wanted = set(range(min(limit or 100, 100))) - done - {41} - set(range(0, 100, 20))
    assert in_tables(chunks, "text") == len(wanted)


def test_no_more_is_read_in_columns_than_the_first_rows(tmp_path: Path) -> None:
    source = SelectedSource(_Endless(), Selection(limit=30))
    assert [len(chunk.records) for chunk in source.in_columns(["id"]).chunks(skipping({28, 29}))] == [20, 8]
    assert len(list(source.in_columns(["id"]).chunks(skipping(set())))) == 2


def test_shards_and_samples_stay_rows(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n' * 50)
    for selection in (Selection(shard=(1, 3)), Selection(sample=0.5)):
        chunks = compared(SelectedSource(open_source(tmp_path / "in.jsonl"), selection), ["id"])
        assert in_tables(chunks, "id") == 0


class _Endless(SequenceSource):
    def __init__(self) -> None:
        super().__init__([])

    def in_columns(self, names: Sequence[str]) -> Source:
        return self

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        for start in itertools.count(0, 20):
            yield Chunk([Record(position, position, {}) for position in todo(start, start + 20, next_todo)], (), 0)
