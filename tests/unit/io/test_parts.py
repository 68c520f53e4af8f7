from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.io.parts import Interval, PartFolder, atomic_file


@pytest.fixture
def parts(tmp_path: Path) -> PartFolder:
    return PartFolder(tmp_path, ".jsonl")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_file(target) as file:
        file.write(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError), atomic_file(target) as file:  # noqa: PT012 - the body is what fails
        file.write(b"half")
        raise ZeroDivisionError
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_committed_parts_are_read_from_their_names(parts: PartFolder) -> None:
    parts.commit(Interval(5, 9), b"rows\n", b"")
    parts.commit(Interval(0, 3), b"", b"error\n")
    (parts.path / "part-000000000009-000000000012.jsonl.tmp").write_bytes(b"")  # killed while writing
    (parts.path / "part-000000000012-000000000015.errors.jsonl").write_bytes(b"error\n")  # killed between the two
    (parts.path / "part-000000000015-000000000018.parquet").write_bytes(b"")  # another format
    assert parts.committed() == [Interval(0, 3), Interval(5, 9)]
    assert parts.count_errors() == 1


def test_the_dead_letters_are_there_before_the_part(parts: PartFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the moment of a kill, a committed part has its twin."""
    seen = []
    rename = os.replace

    def spy(self: Path, target: Path) -> Path:
        seen.append(target.name)
        rename(self, target)
        return target

    monkeypatch.setattr(Path, "replace", spy)
    parts.commit(Interval(0, 3), b"rows\n", b"error\n")
    assert seen == ["part-000000000000-000000000003.errors.jsonl", "part-000000000000-000000000003.jsonl"]


def test_a_twin_without_its_part_is_overwritten(parts: PartFolder) -> None:
    interval = Interval(0, 3)
    for failures in (b"new\n", b""):
        parts.errors_path(interval).write_bytes(b"stale\nstale\n")
        parts.commit(interval, b"rows\n", failures)
        assert parts.count_errors() == failures.count(b"\n")


def test_dead_letters_are_merged_in_input_order(parts: PartFolder, tmp_path: Path) -> None:
    target = tmp_path / "out.errors.jsonl"
    parts.commit(Interval(7, 9), b"", b"three\n")
    parts.commit(Interval(0, 5), b"", b"one\ntwo\n")
    parts.commit(Interval(5, 7), b"rows\n", b"")
    parts.merge_errors(target)
    assert target.read_bytes() == b"one\ntwo\nthree\n"
    parts.clear()
    assert parts.committed() == []
    parts.merge_errors(target)
    assert not target.exists()


def test_clearing_leaves_what_is_no_part(parts: PartFolder) -> None:
    (parts.path / "job.json").write_text("{}")
    (parts.path / "part-000000000009-000000000012.jsonl.tmp").write_bytes(b"")
    parts.commit(Interval(0, 3), b"rows\n", b"error\n")
    parts.clear()
    assert [path.name for path in parts.path.iterdir()] == ["job.json"]


def test_a_position_of_any_length_keeps_its_place(parts: PartFolder) -> None:
    far = Interval(10**12, 10**12 + 1)
    parts.commit(far, b"", b"")
    parts.commit(Interval(0, 1), b"", b"")
    assert parts.committed() == [Interval(0, 1), far]
