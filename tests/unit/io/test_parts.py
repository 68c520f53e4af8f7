from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BrokenOffError
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.storage import parts as parts_module
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.checksums import DigestWriter, Seal
from headrace.io.storage.parts import Interval, PartFolder
from headrace.records import Ok, Record


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
    assert [name.partition(".")[0] for name in seen] == ["part-000000000000-000000000003"] * 2
    assert [Path(name).suffix for name in seen] == [".errors", ".jsonl"]


def test_a_twin_without_its_part_is_overwritten(parts: PartFolder) -> None:
    """Whichever version of Headrace has written it."""
    interval = Interval(0, 3)
    for failures in (b"new\n", b""):
        stale = PartFolder(parts.path, ".jsonl")
        stale.commit(interval, b"row\n", b"stale\nstale\n")
        stale.part_path(interval).unlink()
        (parts.path / "part-000000000000-000000000003.errors.jsonl").write_bytes(b"stale\nstale\n")
        parts = PartFolder(parts.path, ".jsonl")
        parts.commit(interval, b"row\n" * (3 - failures.count(b"\n")), failures)
        assert parts.count_errors() == failures.count(b"\n")
        assert len(list(parts.path.iterdir())) == 2
        assert parts.check([interval], [interval]) == []


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


@pytest.fixture
def folder(tmp_path: Path) -> PartFolder:
    """A folder of parts with its working folder within."""
    (tmp_path / "_headrace").mkdir()
    return PartFolder(tmp_path, ".jsonl", tmp_path / "_headrace")


def test_half_written_files_never_stand_among_the_parts(folder: PartFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append({path.name for path in folder.path.iterdir()}))
    folder.commit(Interval(0, 3), b"row\n" * 2, b"error\n")
    assert seen == [{"_headrace"}] * 3 + [{"_headrace", "part-000000000000-000000000003.jsonl"}]


def test_what_killed_processes_left_half_written_is_swept(folder: PartFolder) -> None:
    left = [
        folder.path / "part-000000000009-000000000012.jsonl.tmp",  # of the first version
        folder.path / "_headrace" / ".part-000000000009-000000000012.jsonl.tmp",
        folder.path / "_headrace" / ".job.json.tmp",
    ]
    mine = folder.path / "mine.tmp"
    for path in (*left, mine):
        path.write_bytes(b"half")
    folder.take_over()
    assert not any(path.exists() for path in left)
    assert mine.exists()


GOOD = b'{"id":1}\n{"id":2}\n'


def damages(part: Path, twin: Path) -> dict[str, Callable[[], object]]:
    """What may happen to a part; each is found by its size, but the last two."""
    return {
        "cut": lambda: part.write_bytes(GOOD[:7]),
        "emptied": lambda: part.write_bytes(b""),
        "grown": lambda: part.write_bytes(GOOD + b"\n"),
        "letters emptied": lambda: twin.write_bytes(b""),
        "letters gone": twin.unlink,
        "other content": lambda: part.write_bytes(GOOD[::-1]),
        "other letters": lambda: twin.write_bytes(b"ERROR\n"),
    }


@pytest.mark.parametrize("kind", damages(Path(), Path()))
def test_damage_is_found(folder: PartFolder, kind: str) -> None:
    sound, other = Interval(0, 3), Interval(3, 6)
    for interval in (sound, other):
        folder.commit(interval, GOOD, b"error\n")
    assert folder.check([sound, other], {sound, other}) == []
    damages(folder.part_path(other), folder.twins([other])[0])[kind]()
    in_size = not kind.startswith("other")
    if kind == "letters gone":  # what remains is a part without a seal: its rows are counted
        assert folder.check([other]) == []
    else:
        assert bool(folder.check([sound, other])) == in_size
    (found,) = folder.check([sound, other], {sound, other})
    assert found.interval == other
    assert folder.part_path(other).name in str(found)
    intervals, damaged = folder.resume()
    assert (intervals, damaged) == ([sound], [found])
    assert not folder.part_path(other).exists(), "it is made anew"


def test_parts_too_many_to_read_at_once_are_read_at_the_end(
    folder: PartFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "READ_AT_ONCE_BYTES", 10)
    folder.commit(Interval(0, 2), GOOD, b"")
    folder.part_path(Interval(0, 2)).write_bytes(GOOD[::-1])
    assert folder.resume() == ([Interval(0, 2)], [])
    with pytest.raises(BrokenOffError, match=r"part-000000000000-000000000002\.jsonl.*checksum.*run again"):
        folder.close(read_all=False)
    assert folder.committed() == []


def test_what_this_run_wrote_is_read_only_where_all_is(folder: PartFolder) -> None:
    folder.resume()
    folder.commit(Interval(0, 2), GOOD, b"")
    folder.part_path(Interval(0, 2)).write_bytes(GOOD[::-1])
    assert folder.close(read_all=False) == [Interval(0, 2)]
    with pytest.raises(BrokenOffError):
        folder.close(read_all=True)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_parts_of_the_first_version_are_checked_by_their_rows(tmp_path: Path, suffix: str) -> None:
    folder = PartFolder(tmp_path, suffix)
    writer = ParquetWriter("out") if suffix == ".parquet" else JsonlWriter("out", suffix.removeprefix(".jsonl"))
    for interval in (Interval(0, 3), Interval(3, 6)):
        content = writer.encode([Ok(Record(n, n, {}), n, 1) for n in range(*interval) if n != 4])
        folder.part_path(interval).write_bytes(content)
    (tmp_path / "part-000000000003-000000000006.errors.jsonl").write_bytes(b"error\n")
    intervals = folder.committed()
    assert folder.check(intervals, intervals) == []
    assert folder.count_errors() == 1
    for damaged in (content[: len(content) // 2], b"", writer.encode([])):
        folder.part_path(Interval(3, 6)).write_bytes(damaged)
        (found,) = folder.check(intervals, intervals)
        assert found.interval == (3, 6)
        assert "2 are its share" in found.reason
    assert folder.resume()[0] == [Interval(0, 3)]


def test_while_a_retry_ends_a_part_has_a_twin_that_fits(folder: PartFolder) -> None:
    interval = Interval(0, 3)
    folder.commit(interval, GOOD, b"error\n")
    new = GOOD + b'{"id":3}\n'
    (folder.path / "_headrace" / sealed(interval, [new]).name).write_bytes(b"")
    assert folder.check([interval], [interval]) == []
    assert folder.count_errors() == 1
    folder.part_path(interval).write_bytes(new)
    assert folder.check([interval], [interval]) == []
    assert folder.count_errors() == 0
    folder.settle()
    assert len(list((folder.path / "_headrace").iterdir())) == 1
    assert folder.check([interval], [interval]) == []


def sealed(interval: Interval, blocks: list[bytes], failures: bytes = b"") -> Seal:
    """The seal of a part that is written in these blocks, as a retry writes it."""
    part = DigestWriter(io.BytesIO())
    for block in blocks:
        part.write(block)
    rows = interval.end - interval.start - failures.count(b"\n")
    return Seal(interval, rows, part.tell(), len(failures), part.digest(failures))


@given(st.integers(0, 10**15), st.integers(5, 10**6), st.lists(st.binary()), st.integers(0, 5))
def test_a_seal_is_its_name(start: int, length: int, blocks: list[bytes], failed: int) -> None:
    seal = sealed(Interval(start, start + length), blocks, b"{}\n" * failed)
    assert Seal.parse(seal.name) == seal
    assert (seal.failed, seal.size, seal.error_size) == (failed, sum(map(len, blocks)), 3 * failed)
    assert seal.digest == sealed(seal.interval, [b"".join(blocks)], b"{}\n" * failed).digest


def test_a_part_without_rows_stands_where_no_reader_looks(folder: PartFolder) -> None:
    """Some take an empty file for a broken one."""
    intervals = [Interval(0, 2), Interval(2, 4)]
    folder.commit(intervals[0], b"", b"error\n" * 2)
    folder.commit(intervals[1], GOOD, b"")
    assert [path.name for path in folder.path.glob("part-*")] == ["part-000000000002-000000000004.jsonl"]
    again = PartFolder(folder.path, ".jsonl", folder.path / "_headrace")
    assert again.committed() == intervals
    assert [again.part_path(interval).read_bytes() for interval in intervals] == [b"", GOOD]
    assert again.check(intervals, intervals) == []
    assert again.count_errors() == 2
    (folder.path / "part-000000000000-000000000002.jsonl").write_bytes(GOOD)  # as a retry leaves it
    (folder.path / "_headrace" / sealed(intervals[0], [GOOD]).name).write_bytes(b"")
    assert again.committed() == intervals
    assert again.check(intervals, intervals) == []
    again.settle()
    assert again.committed() == intervals
    assert (again.count_errors(), again.part_path(intervals[0]).read_bytes()) == (0, GOOD)
    assert len(list((folder.path / "_headrace").iterdir())) == 2
    again.clear()
    assert [path.name for path in folder.path.rglob("*")] == ["_headrace"]
