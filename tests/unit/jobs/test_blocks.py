"""Rows of blocks come out once, in order, with their own outputs, whatever the order in which they are done."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columns import Column, PayloadList, PreparedColumn, values_of
from headrace.errors import RecordError
from headrace.io.storage.parts import Interval
from headrace.jobs.pipeline.blocks import Block, BlockPiece, BlockRows, Labels, RecordPiece, RowsDone, is_array
from headrace.jobs.pipeline.write import Coalescer, OutcomePiece
from headrace.records import Failed, Ok, Record

FOREVER = float("inf")


def block_of(start: int, size: int, costs: Sequence[int] | None = None, errors: Sequence[int] = ()) -> Block:
    records = [Record(start + row, start + row, {"text": f"t{start + row}"}) for row in range(size)]
    ids: Column = pa.array(range(start, start + size))
    prepared = PreparedColumn(
        PayloadList([f"p{record.position}" for record in records]),
        np.array(costs or [1] * size),
        {row: RecordError("no") for row in errors},
    )
    return Block(start, records, lambda record: record, Labels(ids, np.arange(start, start + size)), prepared)


def outputs_of(block: Block, rows: Sequence[int], kind: str) -> Any:
    values = [(block.start + row) / 2 for row in rows]
    return {"list": values, "array": np.array(values), "rows": np.array([[value, -value] for value in values])}[kind]


def first_of(output: Any) -> float:
    return float(output[0]) if np.ndim(output) else float(output)


def expanded(interval: Interval, pieces: Sequence[OutcomePiece]) -> list[tuple[int, float | None]]:
    """Each place of a run with its output, None for a failure; the columns and the rows of a piece must agree."""
    found: dict[int, float | None] = {}
    for piece in pieces:
        for failed in piece.failed:
            found[failed.record.position] = None
        rows = {ok.record.position: first_of(ok.output) for ok in piece.rows()}
        if isinstance(piece, BlockPiece):
            columns = piece.columns
            outputs = [first_of(output) for output in columns.outputs]
            assert dict(zip(values_of(columns.ids), outputs, strict=True)) == rows
        found |= rows
    assert sorted(found) == list(range(*interval))
    return sorted(found.items())


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_every_row_comes_out_once_in_order_whatever_the_order_in(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6), "sizes; 0 is a record of its own")
    kind = data.draw(st.sampled_from(["list", "array", "rows", "mixed"]))
    part_records = data.draw(st.integers(1, 12))
    chance = random.Random(data.draw(st.integers(0, 1000)))
    coalescer = Coalescer(part_records, interval_s=10)
    steps: list[tuple[Block | None, list[int]]] = []
    place, failing = 0, set()
    for size in sizes:
        if not size:
            steps.append((None, [place]))
            place += 1
            continue
        block = block_of(place, size)
        coalescer.open(block)
        rows = list(range(size))
        chance.shuffle(rows)
        while rows:
            count = chance.randint(1, len(rows))
            taken, rows = rows[:count], rows[count:]
            steps.append((block, taken))
        place += size
    chance.shuffle(steps)
    taken_out: list[tuple[int, float | None]] = []
    for block, rows in steps:
        if block is None:
            coalescer.add([Ok(Record(rows[0], rows[0], None), rows[0] / 2)], now=0)
        elif len(rows) == 1 and chance.random() < 0.5:
            position = block.start + rows[0]
            if chance.random() < 0.5:
                failing.add(position)
                coalescer.add([Failed(Record(position, position, None), "E", "bad")], now=0)
            else:
                coalescer.add([Ok(Record(position, position, None), position / 2)], now=0)
        else:
            own = chance.choice(["list", "array", "rows"]) if kind == "mixed" else kind
            coalescer.add_rows(RowsDone(block, np.array(rows), outputs_of(block, rows, own)), now=0)
        while run := coalescer.take(now=FOREVER if chance.random() < 0.2 else 0):
            taken_out += expanded(*run)
    while run := coalescer.take(FOREVER):
        taken_out += expanded(*run)
    assert not len(coalescer)
    assert sorted(place for place, _ in taken_out) == list(range(place))
    assert dict(taken_out) == {number: None if number in failing else number / 2 for number in range(place)}


def test_a_whole_block_is_given_out_and_one_that_is_not_waits_for_its_oldest_row() -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    first, second = block_of(0, 40), block_of(40, 80)
    coalescer.open(first)
    coalescer.open(second)
    coalescer.add_rows(RowsDone(first, np.arange(40), np.zeros(40)), now=0)
    coalescer.add_rows(RowsDone(second, np.arange(40), np.zeros(40)), now=5)
    assert coalescer.take(9.9) is None
    interval, _ = coalescer.take(10.0) or (None, [])
    assert interval == Interval(0, 40)
    interval, _ = coalescer.take(15.0) or (None, [])
    assert interval == Interval(40, 80)
    assert coalescer.take(FOREVER) is None  # the rest has no outcome yet
    coalescer.add_rows(RowsDone(second, np.arange(40, 80), np.zeros(40)), now=16)
    assert (coalescer.take(FOREVER) or (None,))[0] == Interval(80, 120)


def test_a_long_block_fills_parts_that_are_not_much_too_long() -> None:
    coalescer = Coalescer(part_records=600, interval_s=10)
    block = block_of(0, 4096)
    coalescer.open(block)
    coalescer.add_rows(RowsDone(block, np.arange(4096), np.zeros(4096)), now=0)
    intervals = []
    while run := coalescer.take(FOREVER):
        intervals.append(run[0])
    assert max(end - start for start, end in intervals) < 2 * 600


def test_memory_that_is_short_makes_shorter_parts() -> None:
    coalescer = Coalescer(part_records=600, interval_s=10)
    coalescer.part_records = 3
    block = block_of(0, 10)
    coalescer.open(block)
    coalescer.add_rows(RowsDone(block, np.arange(10), np.zeros(10)), now=0)
    sizes = []
    while run := coalescer.take(0):
        sizes.append(run[0].end - run[0].start)
    assert sizes == [3, 3, 3]  # the last row waits for others


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70), st.sets(st.integers(0, 59)))
def test_runs_have_one_cost_and_hold_every_row_that_can_be_run(
    costs: list[int], portion: int, errors: set[int]
) -> None:
    errors = {row for row in errors if row < len(costs)}
    block = block_of(7, len(costs), costs, sorted(errors))
    runs = list(block.runs(portion))
    assert sorted(row for run in runs for row in run.rows.tolist()) == sorted(set(range(len(costs))) - errors)
    assert block.to_run == len(costs) - len(errors)
    for run in runs:
        assert {costs[row] for row in run.rows.tolist()} == {run.cost}
        assert [work.payload for work in run] == [f"p{7 + row}" for row in run.rows.tolist()]
    seen = -1
    for run in runs:  # a portion is not begun before the one before it has been handed out
        assert min(run.rows) // portion >= seen
        seen = max(run.rows) // portion
        assert seen == min(run.rows) // portion


def test_a_portion_without_a_row_to_run_gives_no_run() -> None:
    assert [run.rows.tolist() for run in block_of(0, 6, errors=[2, 3]).runs(2)] == [[0, 1], [4, 5]]
    assert list(block_of(0, 2, errors=[0, 1]).runs(2)) == []


def test_the_costliest_come_first_unless_the_order_is_kept() -> None:
    block = block_of(0, 5, [1, 3, 2, 3, 1])
    assert [run.rows.tolist() for run in block.runs(10)] == [[1, 3], [2], [0, 4]]
    assert [run.rows.tolist() for run in block.runs(10, in_order=True)] == [[0], [1], [2], [3], [4]]


def test_a_batch_of_several_blocks_gives_the_engine_the_payloads_in_their_order() -> None:
    first, second = block_of(0, 3), block_of(10, 3)
    batch = BlockRows.joined([BlockRows(first, np.array([2, 0])), BlockRows(second, np.array([1]))])
    assert list(batch.payloads()) == ["p2", "p0", "p11"]
    assert batch.extent() == (3, 0, 11)
    assert [work.record.position for work in batch] == [2, 0, 11]


def test_outputs_of_another_type_end_the_array_and_lose_nothing() -> None:
    block = block_of(0, 4)
    block.put(np.array([0, 1]), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    assert isinstance(block.outputs, np.ndarray)
    block.put(np.array([3]), [{"label": "x"}])
    block.put(np.array([2]), np.array([[5.0]], np.float32))
    assert [np.asarray(one).tolist() if isinstance(one, np.ndarray) else one for one in block.outputs] == [
        [1.0, 2.0], [3.0, 4.0], [5.0], {"label": "x"},
    ]  # fmt: skip


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_record_beside_a_block_joins_its_run(order: list[int]) -> None:
    coalescer = Coalescer(part_records=1000, interval_s=10)
    block = block_of(0, 3)
    coalescer.open(block)
    for one in order:
        if one:
            coalescer.add([Ok(Record(3, 3, None), 1.5)], now=0)
        else:
            coalescer.add_rows(RowsDone(block, np.arange(3), np.zeros(3)), now=0)
    interval, pieces = coalescer.take(FOREVER) or (None, [])
    assert interval == Interval(0, 4)
    assert [type(piece) for piece in pieces] == [BlockPiece, RecordPiece]


def test_a_piece_that_is_written_does_not_see_rows_that_fail_meanwhile() -> None:
    block = block_of(0, 4)
    block.put(np.array([0, 1]), [0.0, 0.5])
    block.put_one(2, Failed(Record(2, 2, None), "E", "bad"))
    piece = BlockPiece(block, 0, 3)

    class Grows(dict[int, Failed]):
        """What another thread changes while it is looked at."""

        def __iter__(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

        items = keys = values = __iter__  # type: ignore[assignment]

    block.failed = Grows(block.failed)
    assert [failed.record.position for failed in piece.failed] == [2]
    assert [ok.record.position for ok in piece.rows()] == [0, 1]
    assert values_of(piece.columns.ids) == [0, 1]


def test_an_array_takes_the_rows_of_records_that_were_tried_again() -> None:
    block = block_of(0, 4)
    block.put(np.array([0, 1]), np.ones((2, 3), np.float32))
    block.put_one(2, Ok(block.records[2], np.full(3, 2, np.float32), 1, None))
    assert is_array(block.outputs)
    block.put_one(3, Ok(block.records[3], np.full(3, 0.1), 1, None))  # of another type, which keeps its digits
    assert [list(map(float, row)) for row in block.outputs] == [[1] * 3, [1] * 3, [2] * 3, [0.1] * 3]
