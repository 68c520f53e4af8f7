from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.in_columns import skipping

from headrace.errors import JobError
from headrace.io.sources import unique_ids
from headrace.io.sources.unique_ids import Found, Key, SeenIds, Unseen
from headrace.io.storage.rows import positions_todo

KEY = Key(7)
TEXTS = st.lists(st.text(max_size=20) | st.text("ab\0", max_size=300) | st.integers(-9, 9).map(str), max_size=40)


def digests(texts: Sequence[str], key: Key = KEY) -> list[int]:
    encoded = [text.encode() for text in texts]
    found: list[int] = key.digests(b"".join(encoded), np.cumsum([0, *map(len, encoded)])).tolist()
    return found


@given(TEXTS)
def test_equal_ids_have_equal_digests_and_others_do_not(texts: list[str]) -> None:
    found = digests(texts)
    assert found == [digests([text])[0] for text in texts]
    assert len(set(found)) == len(set(texts))
    assert digests(texts, Key(8)) != found or not texts


def test_ids_that_differ_little_have_other_digests() -> None:
    texts = ["", "\0", "\0\0", *("a" * count for count in range(1, 600)), *(f"doc-{n}" for n in range(50_000))]
    assert len(set(digests(texts))) == len(texts)
    bits = np.unpackbits(np.array(digests(texts[-50_000:]), np.uint64).view(np.uint8).reshape(-1, 8), axis=1)
    assert abs(bits.mean(0) - 0.5).max() < 0.02  # runs of digests are merged by ranges of equal size


@given(TEXTS)
def test_a_column_is_as_its_texts(texts: list[str]) -> None:
    column = pa.array(["before", *texts, "after"], pa.string()).slice(1, len(texts)).cast(pa.large_string())
    _, ends, content = column.buffers()
    bounds = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
    assert KEY.digests(content or b"", bounds).tolist() == digests(texts)


def seen_ids(folder: Path, again: Callable[[], Iterator[Found]] = lambda: iter(())) -> SeenIds:
    return SeenIds(folder, again, "id")


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", None, "1"]),
        pa.array(["a", "b", None, "1"], pa.large_string()),
        pa.array(["a", "b", None, "1"]).dictionary_encode(),
        pa.array([5, 6, None, 1]),
        pa.array([5, 6, None, 1], pa.uint8()),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("by_column", [True, False])
def test_an_id_is_the_same_as_text_and_as_number(tmp_path: Path, column: pa.Array, by_column: bool) -> None:
    def again() -> Iterator[Found]:
        yield 0, "1"
        yield 13, "1"

    seen = seen_ids(tmp_path, again)
    seen.add(["1", None, "2"], [0, 1, 2], 3)
    texts = [None if value is None else str(value) for value in column.to_pylist()]
    with pytest.raises(JobError, match="id '1' comes twice: in column 'id' of records 0 and 13"):
        seen.add_column(column, np.arange(10, 14), 14) if by_column else seen.add(texts, range(10, 14), 14)
    others = seen_ids(tmp_path / "others")
    others.add(["x", None, "y"], [0, 1, 2], 3)
    others.add_column(column, np.arange(10, 14), 14)
    others.look()


def test_values_that_are_no_ids_are_left_out(tmp_path: Path) -> None:
    seen = seen_ids(tmp_path)
    seen.add_column(pa.nulls(2, pa.string()), np.arange(2), 2)
    seen.add([None, None], [2, 3], 4)
    seen.look()


def test_runs_go_on_with_their_key_and_those_of_earlier_versions_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique_ids, "RUN_RECORDS", 10)
    (tmp_path / "ids-000000000000-000000000100.u64").write_bytes(bytes(800))
    first = seen_ids(tmp_path)
    assert first.known == 0
    first.add([f"id {n}" for n in range(20)], range(20), 20)
    again = seen_ids(tmp_path, lambda: iter([(3, "id 3"), (20, "id 3")]))
    assert again.known == 20
    # Those that are known may come again.
    again.add_column(pa.array(["id 0", "id 1", "id 20"]), np.array([0, 1, 20]), 21)
    with pytest.raises(JobError, match="records 3 and 21"):
        seen_ids(tmp_path, lambda: iter([(3, "id 3"), (21, "id 3")])).add(["id 20", "id 3"], [20, 21], 22)
    assert again.known == 20


def never() -> Iterator[Found]:
    raise AssertionError("the input is read again")


@pytest.mark.parametrize("by_column", [True, False])
def test_integers_that_ascend_are_not_read_again_and_a_resume_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_column: bool
) -> None:
    monkeypatch.setattr(unique_ids, "RUN_RECORDS", 10)

    def add(seen: SeenIds, ids: Sequence[int], start: int) -> None:
        positions = np.arange(start, end := start + len(ids))
        if by_column:
            seen.add_column(pa.array(ids), positions, end)
        else:
            seen.add(list(map(str, ids)), positions.tolist(), end)

    first = seen_ids(tmp_path, never)
    add(first, range(-5, 15, 2), 0)
    add(first, range(20, 23), 10)
    first.look()
    again = seen_ids(tmp_path, never)
    assert again.known == 10
    add(again, range(14, 20), 10)
    add(again, [], 16)
    again.look()
    ids = [*range(-5, 15, 2), *range(14, 20), -3]
    other = seen_ids(tmp_path, lambda: ((place, str(value)) for place, value in enumerate(ids)))
    assert other.known == 10
    with pytest.raises(JobError, match="id '-3' comes twice: in column 'id' of records 1 and 16"):
        add(other, ids[10:], 10)
    assert seen_ids(tmp_path, never).known in (0, 10)  # by digests now


@given(st.lists(st.lists(st.integers(0, 30) | st.integers(-(2**63), 2**63 - 1), max_size=6), max_size=6))
def test_ids_that_ascend_for_a_while_are_compared_with_later_ones(chunks: list[list[int]]) -> None:
    ids = [value for chunk in chunks for value in sorted(chunk)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(unique_ids, "RUN_RECORDS", 5)
        patch.setattr(unique_ids, "BLOCK", 3)
        seen, position, found = seen_ids(Path(folder), lambda: ((n, str(one)) for n, one in enumerate(ids))), 0, False
        try:
            for chunk in chunks:
                column = pa.array(sorted(chunk), pa.int64())
                seen.add_column(column, np.arange(position, position := position + len(chunk)), position)
            seen.look()
        except JobError:
            found = True
        assert found == (len(set(ids)) < len(ids))


def test_what_is_read_is_unfinished_or_unseen() -> None:
    drawn = random.Random(1)
    for _ in range(200):
        done = {drawn.randrange(30) for _ in range(drawn.randrange(30))}
        bound = drawn.randrange(40)
        wanted = [position for position in range(40) if position >= bound or position not in done]
        unseen = Unseen(skipping(done), bound)
        assert positions_todo(0, 40, unseen).tolist() == wanted
        assert [position for position in range(40) if unseen(position) == position] == wanted
        assert unseen.next_done(bound) == sys.maxsize


@given(st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=12))
def test_the_ids_that_came_before_are_found_whatever_the_filter_says(chunks: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(unique_ids, "FILTER_BITS", 3)  # so that it says of nearly none that it is new
        patch.setattr(unique_ids, "RUN_RECORDS", 20)
        seen = unique_ids._Digests(Path(folder))
        before: set[int] = set()
        position = 0
        for chunk in chunks:
            twice = []
            for place, value in enumerate(chunk, position):
                twice += [place] if value in before else []
                before.add(value)
            values = np.array(digests(list(map(str, chunk))), np.uint64)
            seen.add(values, np.arange(position, position := position + len(chunk)), position)
            assert seen.look() == twice
            if seen.is_full:
                seen.put_away()
