"""Each situation gets the sentence that helps there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.observe.advice import AdviceInputs, advise

QUIET = {"load": 0.1, "prepare": 0.1, "finish": 0.1, "write": 0.1}
GOOD = AdviceInputs(
    records=1_000,
    failed=0,
    batches=50,
    wall_s=100.0,
    busy=0.98,
    starved_s=0.5,
    padding_efficiency=0.97,
    host_s=QUIET,
)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (GOOD, "the host is not the bottleneck"),
        (replace(GOOD, records=0, batches=0), "Nothing was left to do"),
        (replace(GOOD, failed=200), "20% of the records failed"),
        (replace(GOOD, wall_s=1.0), "too short"),
        (replace(GOOD, padding_efficiency=0.6), "40% of what it computed was padding"),
        (replace(GOOD, busy=0.5, starved_s=45, host_s=QUIET | {"prepare": 90.0}), "more --workers"),
        (replace(GOOD, busy=0.5, starved_s=45, host_s=QUIET | {"load": 60.0}), "reading the input was the slowest"),
        (replace(GOOD, busy=0.5, starved_s=45, host_s=QUIET | {"write": 60.0}), "writing the output was the slowest"),
        (replace(GOOD, busy=0.5, starved_s=45, host_s=QUIET | {"finish": 60.0}), "finishing the results"),
        (replace(GOOD, busy=0.5, starved_s=40), "batches of 20 records"),
        (
            replace(GOOD, busy=0.5, starved_s=1, host_s=QUIET | {"write": 60.0}),
            "before the first batch or after the last",
        ),
    ],
)
def test_advice(numbers: AdviceInputs, expected: str) -> None:
    advice = advise(numbers)
    assert expected in advice
    assert advice.endswith(".")
    assert advice.count(". ") == 0  # one sentence


def test_a_busy_engine_is_praised_even_when_host_stages_were_long() -> None:
    """Stages overlap: much work on the host is no fault while the engine never waits for it."""
    assert "the host is not the bottleneck" in advise(replace(GOOD, host_s=QUIET | {"prepare": 95.0}))
