"""Which sizes of steps `headrace tune` tries, and which it takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from headrace.app.step_grid import StepGrid, StepRow, _searched, _with_additions
from headrace.cli.tune import step_lines
from headrace.device.step_sizes import StepSize
from headrace.errors import ConfigError

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


TEXTS = {position: f"answer {position}" for position in range(100)}


def row(size: StepSize, speed: float, changed: int = 0) -> StepRow:
    """Of 100 answers, `changed` are others than usual."""
    return StepRow(size, 0, speed, None, 1, {**TEXTS, **dict.fromkeys(range(changed), "another")})


def with_additions(
    speculation: tuple[float, int], cache: tuple[float, int], options: Mapping[str, object] | None = None
) -> StepGrid:
    """Of a model with a speed of 10, whose other size changes 2 of 100 answers: the speed and the changes of each."""
    size = StepSize(64, 512)
    usual = row(size, 10)
    grid = StepGrid((usual, row(StepSize(32, 512), 9, 2)), usual, "a CPU")

    def measured(size: StepSize, arguments: Mapping[str, object]) -> StepRow:
        effects = {"speculative_config": speculation, "kv_cache_dtype": cache}
        speed, changed = 10.0, 0
        for times, more in (effects[name] for name in arguments):
            if not times:
                raise ConfigError("vLLM refuses it")
            speed, changed = speed * times, changed + more
        return row(size, speed, changed)

    return _with_additions(grid, options or {}, measured)


def test_an_addition_stays_if_it_is_faster_and_changes_no_more_answers_than_another_size() -> None:
    grid = with_additions((1.5, 0), (1.2, 3))
    assert [(round(one.speed, 2), one.same, one.stays) for one in grid.additions] == [(1.5, 1, True), (1.2, 0.97, True)]
    assert grid.arguments["kv_cache_dtype"] == "fp8"
    [line] = [line for line in step_lines(grid) if line.startswith("chosen: ")]
    assert '--max-num-seqs 64 --max-num-batched-tokens 512 --speculative-config \'{"method": "ngram"' in line
    assert line.endswith("--kv-cache-dtype fp8")


def test_an_addition_that_loses_or_changes_answers_does_not() -> None:
    grid = with_additions((0.5, 0), (2, 4))
    assert [one.why_not for one in grid.additions] == ["no faster", "other answers"]
    assert grid.arguments == {}
    assert with_additions((1.02, 0), (1, 0)).arguments == {}


def test_an_addition_that_vllm_refuses_is_told() -> None:
    grid = with_additions((0, 0), (1.5, 0))
    assert [one.why_not for one in grid.additions] == ["vLLM refuses it", ""]
    assert any("vLLM refuses it" in line for line in step_lines(grid))


def test_what_the_user_sets_is_not_tried() -> None:
    grid = with_additions((1.5, 0), (1.5, 0), {"kv_cache_dtype": "auto", "speculative_config": None})
    assert [one.name for one in grid.additions] == ["n-gram speculation"]
