"""Which sizes of steps `headrace tune` tries, and which it takes."""

from __future__ import annotations

import math

from headrace.app.step_grid import StepGrid, StepRow, _searched
from headrace.device.step_sizes import StepSize

COUNTS, LENGTHS = [16, 32, 64, 128], [128, 256, 512]


def searched(seconds: float) -> StepGrid:
    """The grid of a model that does best with 32 answers and 256 tokens."""

    def row(size: StepSize) -> StepRow:
        apart = abs(math.log2(size.answers / 32)) + abs(math.log2(size.tokens / 256))
        return StepRow(size, 1000 - apart, 100 - apart, None)

    return _searched(StepSize(64, 512), (COUNTS, LENGTHS), seconds, row)


def test_answers_are_tried_first_and_then_tokens_with_the_best_of_them() -> None:
    grid = searched(60)
    assert grid.chosen.size == StepSize(32, 256)
    tried = {(row.size.answers, row.size.tokens) for row in grid.rows}
    assert tried == {(count, 512) for count in COUNTS} | {(32, tokens) for tokens in LENGTHS}
    assert [row.size.tokens for row in grid.rows] == [128, 256, 512, 512, 512, 512]


def test_two_sizes_are_tried_however_short_the_time() -> None:
    assert {row.size.answers for row in searched(-1).rows} == {64, 16}
