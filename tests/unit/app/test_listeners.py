"""Listeners of the user's own: they hear of each batch, and what they raise ends no job."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.events import BatchDone, Event


def test_each_batch_is_heard_and_a_listener_that_raises_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def good(event: Event) -> None:
        if isinstance(event, BatchDone):
            heard.append(event.size)

    def bad(event: Event) -> None:
        raise OSError("no room")

    report = headrace.run(
        [{"text": f"text {n}"} for n in range(10)],
        sink=tmp_path / "out.jsonl",
        task="embed",
        engine="headrace.testing:FakeEngine",
        listeners=[bad, good],
        progress=False,
    )
    assert sum(heard) == report.ok == 10
    assert caplog.text.count("it is left out") == 1


@pytest.mark.parametrize("wrong", [3, "print", [1], print])
def test_what_is_no_list_of_functions_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="a list of functions"):
        headrace.run([{"text": "a"}], sink=tmp_path / "out.jsonl", listeners=wrong, progress=False)  # type: ignore[arg-type]
