from __future__ import annotations

from pathlib import Path

from headrace.jobs.state.in_flight import InFlightFile, extent_of


def test_two_batches_in_the_engine_are_both_noted_until_each_has_left(tmp_path: Path) -> None:
    noted, later = InFlightFile(tmp_path), InFlightFile(tmp_path)
    first, second = extent_of([5, 3]), extent_of([10, 12, 11])
    noted.enter(first)
    noted.enter(second)
    assert later.left_behind() == "5 records (positions 3 to 12)"
    noted.leave(first)
    assert later.left_behind() == "3 records (positions 10 to 12)"
    noted.leave(second)
    assert later.left_behind() == ""
    noted.close()
    assert list(tmp_path.iterdir()) == []
