"""Which sizes of steps `headrace tune` tries, and which it takes."""

from __future__ import annotations

import itertools
import math

from headrace.app.step_grid import StepGrid, StepRow, _searched
from headrace.device.step_sizes import StepSize

COUNTS, LENGTHS = [16, 32, 64, 128], [128, 256, 512]


def searched(seconds: float, loss: float = 5, disturbed: int | None = None) -> StepGrid:
    """The grid of a model that does best with 32 answers and 256 tokens; each size is measured for 10 seconds.

    Other work disturbs one of the measurements.
    """
    turns = itertools.count()

    def row(size: StepSize) -> StepRow:
        apart = abs(math.log2(size.answers / 32)) + abs(math.log2(size.tokens / 256))
        speed = 0.5 if next(turns) == disturbed else 1
        return StepRow(size, 1000 - apart, speed * (100 - loss * apart), None, 10)

    return _searched(StepSize(64, 512), (COUNTS, LENGTHS), seconds, row)


def test_answers_are_tried_first_and_then_tokens_with_the_best_of_them() -> None:
    grid = searched(70)
    assert grid.chosen.size == StepSize(32, 256)
    tried = {(row.size.answers, row.size.tokens) for row in grid.rows}
    assert tried == {(count, 512) for count in COUNTS} | {(32, tokens) for tokens in LENGTHS}
    assert [row.size.tokens for row in grid.rows] == [128, 256, 512, 512, 512, 512]


def test_two_sizes_are_tried_however_short_the_time() -> None:
    assert {row.size.answers for row in searched(-1).rows} == {64, 16}


def test_only_answering_counts_as_time() -> None:
    assert [len(searched(seconds).rows) for seconds in (60, 50, 20, 10)] == [6, 5, 2, 2]


def test_the_first_size_stays_unless_another_is_clearly_faster() -> None:
    assert searched(70, loss=1).chosen.size == StepSize(64, 512)
    assert searched(70, loss=2).chosen.size == StepSize(32, 256)


def test_the_first_size_stays_if_only_other_work_made_it_slower() -> None:
    assert searched(70, loss=1, disturbed=0).chosen.size == StepSize(64, 512)
