"""Every name that a folder or glob matches is read, refused, or said to be left out."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance import command

import headrace
from headrace.errors import ConfigError
from headrace.io.sources import folders
from headrace.io.sources.opening import open_source
from headrace.jobs.settings import Limits

FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False}
ROW = '{"text": "x"}\n'


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ROW)
    return folder


def left_out(source: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for item in source.left_out:
        assert item.count == len(item.names)
        found[item.reason] = list(item.names)
    return found


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def looped(path: Path) -> None:
    path.symlink_to(path.name)


def listening(path: Path) -> None:
    folder = Path.cwd()
    os.chdir(path.parent)  # an address of a socket is at most about a hundred bytes long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(folder)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "dangling link": dangling,
    "looped link": looped,
    "fifo": os.mkfifo,
    "socket": listening,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("ending", ["jsonl", "jpg"])
@pytest.mark.parametrize("is_glob", [False, True])
def test_what_is_named_like_an_input_and_cannot_be_read_is_refused(
    tmp_path: Path, kind: str, ending: str, is_glob: bool
) -> None:
    fill(tmp_path, f"a.{ending}")
    SPECIAL[kind](tmp_path / f"b.{ending}")
    with pytest.raises(ConfigError, match=rf"b\.{ending}"):
        open_source(str(tmp_path / "*") if is_glob else tmp_path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("is_glob", [False, True])
def test_all_else_is_listed(tmp_path: Path, is_glob: bool) -> None:
    fill(tmp_path, "a.jsonl", "notes.md", ".hidden.jsonl", "_SUCCESS", "cover.png", "deep/b.jsonl", ".git/c.jsonl")
    for number, make in enumerate(SPECIAL.values()):
        make(tmp_path / f"special-{number}")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "deep")
    source = open_source(str(tmp_path / "*") if is_glob else tmp_path)
    found = left_out(source)
    assert found.pop("of no known format") == ["notes.md", *(f"special-{number}" for number in range(len(SPECIAL)))]
    assert found.pop(folders.HIDDEN) == [".git", ".hidden.jsonl", "_SUCCESS"]
    assert found.pop("an image beside data") == ["cover.png"]
    assert found.pop(folders.LINKED_FOLDER) == ["elsewhere"]
    assert found == ({folders.FOLDER: ["deep"]} if is_glob else {})
    names = [chunk.records[0].data for chunk in source.chunks(lambda position: position)]
    assert len(names) == (1 if is_glob else 2)


def replaced(source: Any) -> Any:
    return source


@pytest.fixture(autouse=True)
def _names_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_NAMED", 100)


def test_a_pattern_that_asks_for_hidden_names_gets_them(tmp_path: Path) -> None:
    fill(tmp_path, "_a.jsonl", "_b.jsonl", "c.jsonl", "d/_e.jsonl", "d/f/g.jsonl", ".h/i.jsonl")
    assert open_source(str(tmp_path / "_*.jsonl")).describe().keys() == {"files"}
    assert list(open_source(str(tmp_path / "_*.jsonl")).describe()["files"]) == ["_a.jsonl", "_b.jsonl"]
    source = open_source(str(tmp_path / "**" / "*.jsonl"))
    assert list(source.describe()["files"]) == ["c.jsonl", "d/f/g.jsonl"]
    assert left_out(source)[folders.HIDDEN] == [".h", "_a.jsonl", "_b.jsonl", "d/_e.jsonl"]


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.jsonl", "deep/b.jsonl")
    scan = os.scandir

    def forbidden(path: Any) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    for name in (tmp_path, tmp_path / "*" / "*.jsonl", tmp_path / "**" / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"cannot list .*deep: Permission denied"):
            open_source(str(name))


def test_a_folder_with_nothing_to_read_says_what_it_holds(tmp_path: Path) -> None:
    fill(tmp_path, "notes.md", ".hidden")
    with pytest.raises(ConfigError, match=r"it holds hidden .*: \.hidden; of no known format: notes\.md"):
        open_source(tmp_path)


def test_the_report_the_start_and_a_dry_run_say_it(tmp_path: Path) -> None:
    fill(tmp_path, "in/a.jsonl", *(f"in/{number}.md" for number in range(5)))
    report = headrace.run(tmp_path / "in", sink=tmp_path / "py.jsonl", **FAKE)
    assert [(item.reason, item.count) for item in report.left_out] == [("of no known format", 5)]
    said = "of no known format: 0.md, 1.md, 2.md and 2 more"
    status, output = command.headrace("run", "-i", "in", "-o", "out.jsonl", *command.FAKE, folder=tmp_path)
    assert (status, output.count(said)) == (0, 2)
    status, output = command.headrace("run", "-i", "in", "-o", "o.jsonl", "--dry-run", *command.FAKE, folder=tmp_path)
    assert (status, output.count(f"left out    {said}")) == (0, 1)


def test_what_a_tar_holds_is_read_refused_or_listed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        for name in ("a.txt", "._a.txt", "b.txt", ".DS_Store"):
            member = tarfile.TarInfo(f"deep/{name}")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
        for name, kind in (
            ("deep", tarfile.DIRTYPE),
            ("c.txt", tarfile.SYMTYPE),
            ("d.txt", tarfile.LNKTYPE),
            ("e.txt", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "deep/a.txt"
            archive.addfile(member)
    sink = tmp_path / "out.jsonl"
    report = headrace.run(tmp_path / "in.tar", sink=sink, text_column="txt", limits=Limits(max_error_rate=1), **FAKE)
    assert (report.ok, report.failed) == (2, 3)
    [item] = report.left_out
    assert (item.reason, item.names) == (folders.HIDDEN, ("in.tar!deep/._a.txt", "in.tar!deep/.DS_Store"))
    letters = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [letter["message"].partition(",")[0] for letter in letters] == [
        "its member c.txt is a link to deep/a.txt",
        "its member d.txt is a link to deep/a.txt",
        "its member e.txt is no file",
    ]


def test_marks_of_folders_in_a_store_are_listed(s3: Any) -> None:
    for key, body in {
        "in/": b"",
        "in/deep/": b"",
        "in/full/": b"x",
        "in/deep/b.jsonl": ROW.encode(),
        "in/x_$folder$": b"",
    }.items():
        s3.call_s3("put_object", Bucket="rows", Key=key, Body=body)
    s3.pipe_file("rows/in/a.jsonl", ROW.encode())
    s3.pipe_file("rows/in/_SUCCESS", b"")
    expected = {folders.HIDDEN: ["_SUCCESS"], folders.MARKER: ["deep", "full"], "of no known format": ["x_$folder$"]}
    assert left_out(open_source("s3://rows/in/")) == expected
    for form in (None, "jsonl"):
        assert list(open_source("s3://rows/in/*.jsonl", form).describe()["files"]) == ["a.jsonl"]
    found = left_out(open_source("s3://rows/in/*"))
    assert found[folders.FOLDER] == ["deep", "full"]


def test_a_link_loop_as_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("loop", "loop.jsonl", "loop/x.jsonl"):
        status, output = command.headrace("run", "-i", name, "-o", "out.jsonl", *command.FAKE, folder=tmp_path)
        assert (status, output.count("\n")) == (2, 1), output
        assert "loop" in output
        status, output = command.headrace("inspect", name, folder=tmp_path)
        assert (status, output.count("\n")) == (2, 1), output
