from __future__ import annotations

import json
import random
import shutil
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.errors import BrokenOffError
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.storage.parts import Interval, PartFolder
from headrace.jobs.pipeline.blocks import RecordPiece
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.ordering import in_windows
from headrace.jobs.state import windows as windows_module
from headrace.jobs.state.job_state import FinishedJob, Pass
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.order_file import read_order, write_order
from headrace.jobs.state.window import OpenWindow, stretches
from headrace.jobs.state.windows import STRIDE, Windows
from headrace.records import Failed, Ok, Record

WRITER = JsonlWriter("out")


def windows_in(folder: Path) -> tuple[Windows, PartFolder]:
    output = PartFolder(folder, WRITER.suffix)
    return Windows(folder / "order", output, WRITER), output


def commit(windows: Windows, window: OpenWindow, start: int, end: int) -> None:
    """Commit these places; every seventh position has failed."""
    records = [Record(window.positions[place], None, None) for place in range(start, end)]
    rows = [Ok(Record(r.position, r.position, None), "x") for r in records if r.position % 7]
    failed = [Failed(record, "bad", "it is") for record in records if record.position % 7 == 0]
    at = window.number * STRIDE
    windows.write(Interval(at + start, at + end), [RecordPiece([*rows, *failed])], WRITER)


def shuffled(count: int) -> list[int]:
    positions = list(range(count))
    random.Random(count).shuffle(positions)
    return positions


def content(output: PartFolder) -> tuple[list[int], list[int]]:
    """The ids of rows, and the positions of dead letters, in the order of the files."""
    committed = output.committed()
    rows = [json.loads(line)["id"] for i in committed for line in output.part_path(i).read_text().splitlines()]
    letters = [
        json.loads(line)["position"] for twin in output.twins(committed) for line in twin.read_text().splitlines()
    ]
    return rows, letters


def test_a_whole_window_returns_to_input_order_and_leaves_nothing(tmp_path: Path) -> None:
    windows, output = windows_in(tmp_path)
    window = windows.create(shuffled(100))
    assert sorted(windows.place(position) for position in range(100)) == [STRIDE + place for place in range(100)]
    assert windows.place(100) == 100, "the place of a record in no window is its position"
    commit(windows, window, 60, 100)
    commit(windows, window, 0, 60)
    assert content(output) == ([n for n in range(100) if n % 7], list(range(0, 100, 7)))
    assert not list((tmp_path / "order").iterdir())
    assert not windows.open


@pytest.mark.parametrize("kill", ["before", "between", "after"])
def test_a_kill_while_a_window_is_put_in_order_loses_and_doubles_nothing(
    tmp_path: Path, kill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, output = windows_in(tmp_path)
    window = windows.create([*shuffled(50), 70, 60])  # three parts
    commits = 0

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def commit_some(interval: Interval, rows: bytes, failures: bytes) -> None:
        nonlocal commits
        commits += 1
        if kill == "before" or commits == 3:
            raise KeyboardInterrupt
        PartFolder.commit(output, interval, rows, failures)

    with monkeypatch.context() as patch:
        patch.setattr(windows_module, "remove_at_once", killed)
        if kill != "after":
            patch.setattr(output, "commit", commit_some)
        with pytest.raises(KeyboardInterrupt):
            commit(windows, window, 0, 52)
    windows, output = windows_in(tmp_path)
    finished, damaged = windows.load(output.resume()[0])
    assert not list(windows.staged_positions)
    assert not damaged
    assert Ledger(finished).done == 52
    positions = [*range(50), 60, 70]
    assert content(output) == ([n for n in positions if n % 7], [n for n in positions if n % 7 == 0])
    assert not list((tmp_path / "order").iterdir())


def test_what_is_committed_of_a_window_is_known_after_a_kill(tmp_path: Path) -> None:
    windows, output = windows_in(tmp_path)
    window = windows.create(shuffled(20))
    commit(windows, window, 5, 9)
    again, output = windows_in(tmp_path)
    again.load(output.committed())
    assert {one.start for one in again.staged_positions} == set(window.positions[5:9])
    assert again.place(window.positions[0]) == STRIDE, "the order has not changed"
    assert again.count_errors() == sum(position % 7 == 0 for position in window.positions[5:9])
    assert again.create([30]).number == 2


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its content has changed: another checksum"),
        (lambda path: path.write_bytes(b""), "it is damaged, or another version of Headrace has written it"),
        (lambda path: path.write_bytes(b"headrace order 2\n" + path.read_bytes()[17:]), "it is damaged, or another"),
    ],
)
def test_a_window_without_its_order_is_computed_again(tmp_path: Path, spoil: object, reason: str) -> None:
    windows, output = windows_in(tmp_path)
    window = windows.create(shuffled(20))
    commit(windows, window, 0, 9)
    assert callable(spoil)
    spoil(window.parts.path / "order")
    again, output = windows_in(tmp_path)
    _, damaged = again.load(output.committed())
    assert not list(again.staged_positions)
    assert not again.open
    [damage] = damaged
    assert reason in str(damage)
    assert damage.interval == Interval(0, 9), "as many records are computed again"
    assert damage.path == window.parts.path / "order"


def test_a_damaged_part_of_a_window_is_computed_again(tmp_path: Path) -> None:
    windows, output = windows_in(tmp_path)
    window = windows.create(shuffled(20))
    commit(windows, window, 0, 9)
    commit(windows, window, 9, 12)
    window.parts.part_path(Interval(0, 9)).write_bytes(b"?")
    with pytest.raises(BrokenOffError, match="damaged since it was committed"):
        commit(windows, window, 12, 20)
    again, output = windows_in(tmp_path)
    _, damaged = again.load(output.committed())
    assert [damage.interval for damage in damaged] == [Interval(0, 9)]
    assert {one.start for one in again.staged_positions} == set(window.positions[9:])


def test_an_order_survives_its_file(tmp_path: Path) -> None:
    positions = array("Q", [5, 0, 1 << 39])
    write_order(tmp_path / "order", positions)
    assert read_order(tmp_path / "order") == positions


def test_stretches_are_consecutive_and_bounded() -> None:
    assert list(stretches([1, 2, 3, 4, 7, 9, 10], 3)) == [range(1, 4), range(4, 5), range(7, 8), range(9, 11)]
    assert not list(stretches([], 3))


def interleaved_windows(folder: Path, window_rows: int = 40) -> tuple[Windows, PartFolder, list[OpenWindow]]:
    """Three windows with every third position each."""
    windows, output = windows_in(folder)
    made = [windows.create(random.Random(n).sample(range(n, 3 * window_rows, 3), window_rows)) for n in range(3)]
    return windows, output, made


def test_windows_that_lie_all_over_the_input_are_merged_at_the_end(tmp_path: Path) -> None:
    windows, output, made = interleaved_windows(tmp_path)
    for window in made:
        commit(windows, window, 0, 40)
    assert not output.committed(), "each would become 40 parts"
    assert not windows.open
    assert windows.staged == 120
    windows.finish()
    assert output.committed() == [Interval(0, 120)]
    assert content(output) == ([n for n in range(120) if n % 7], list(range(0, 120, 7)))
    assert not (tmp_path / "order").exists()


@pytest.mark.parametrize("kill", ["merging", "removing", "removed"])
def test_a_kill_while_windows_are_merged_loses_and_doubles_nothing(
    tmp_path: Path, kill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, output, made = interleaved_windows(tmp_path, 4096)
    for window in made:
        commit(windows, window, 0, 4096)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def commit_one(interval: Interval, rows: bytes, failures: bytes) -> None:
        if output.committed():
            raise KeyboardInterrupt
        PartFolder.commit(output, interval, rows, failures)

    with monkeypatch.context() as patch:
        if kill == "merging":
            patch.setattr(output, "commit", commit_one)
        else:
            module, name = (windows_module, "remove_at_once") if kill == "removing" else (shutil, "rmtree")
            patch.setattr(module, name, killed)
        with pytest.raises(KeyboardInterrupt):
            windows.finish()
    windows, output = windows_in(tmp_path)
    finished, _ = windows.load(output.resume()[0])
    assert Ledger(finished).done == 3 * 4096
    windows.finish()
    assert [interval.end - interval.start for interval in output.committed()] == [4096] * 3
    assert content(output) == ([n for n in range(3 * 4096) if n % 7], list(range(0, 3 * 4096, 7)))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= set()


def test_a_damaged_part_of_a_sorted_window_is_computed_again(tmp_path: Path) -> None:
    windows, output, made = interleaved_windows(tmp_path)
    for window in made:
        commit(windows, window, 0, 40)
    [part] = (tmp_path / "order" / "000000000002.sorted").glob("part-*.jsonl")
    part.write_bytes(b"?")
    with pytest.raises(BrokenOffError, match="damaged since it was committed"):
        windows.finish()
    windows, output = windows_in(tmp_path)
    _, damaged = windows.load(output.resume()[0])
    assert [damage.interval for damage in damaged] == [Interval(0, 40)]
    [window] = windows.open
    assert {one.start % 3 for one in windows.staged_positions} == {0, 2}
    commit(windows, window, 0, 40)
    windows.finish()
    assert content(output) == ([n for n in range(120) if n % 7], list(range(0, 120, 7)))


def test_a_job_that_is_given_up_leaves_what_it_has_in_input_order(tmp_path: Path) -> None:
    windows, output, made = interleaved_windows(tmp_path)
    commit(windows, made[0], 0, 40)
    commit(windows, made[1], 5, 25)
    windows.give_up()
    done = sorted([*made[0].positions, *made[1].positions[5:25]])
    assert content(output) == ([n for n in done if n % 7], [n for n in done if n % 7 == 0])


def test_a_pass_in_input_order_still_counts_what_waits_in_sorted_windows(tmp_path: Path) -> None:
    windows, output = windows_in(tmp_path)
    first = windows.create(range(0, 2_000, 2))
    commit(windows, first, 0, 1_000)
    assert not windows.open and windows.all, "its rows would be many small parts"
    todo = Pass(lambda position: position, output, finish, 0, 0, None, windows=windows)
    job = cast(Job, SimpleNamespace(order=None, listener=None))
    kept, ordering = in_windows(job, todo)
    assert ordering is None and kept.records_now() == 1_000
    windows.finish()
    assert in_windows(job, todo)[0].windows is None


def finish() -> FinishedJob:
    raise AssertionError
