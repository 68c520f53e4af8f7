"""Every format: the same rows at the same positions, whatever is done already, and bytes that add up."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, JobError
from headrace.io.base import Chunk, Source
from headrace.io.sources.opening import open_source
from headrace.io.storage import files
from headrace.io.storage.compression import compress
from headrace.io.storage.rows import blocks

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
feather: Any = pytest.importorskip("pyarrow.feather")

ROWS = [{"id": f"r{n}", "text": f'line one of {n}\nline two, with a , and a " and ä'} for n in range(700)]


def jsonl(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def delimited(rows: Sequence[dict[str, Any]], delimiter: str = ",", end: str = "\r\n") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(rows: Sequence[Any], *, stream: bool = False) -> bytes:
    table, buffer = pa.Table.from_pylist(list(rows)), io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return buffer.getvalue()


def parquet(rows: Sequence[Any], group: int = 300) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer, row_group_size=group)
    return buffer.getvalue()


def feathered(rows: Sequence[Any]) -> bytes:
    buffer = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(list(rows)), buffer, chunksize=300)
    return buffer.getvalue()


def tar(rows: Sequence[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for row in rows:
            for name, content in ((f"{row['id']}.txt", row["text"].encode()), (f"{row['id']}.cls", b"7")):
                member = tarfile.TarInfo(f"./shard/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "in.jsonl": lambda: jsonl(ROWS),
    "in.ndjson.gz": lambda: gzip.compress(jsonl(ROWS[:300])) + gzip.compress(jsonl(ROWS[300:])),
    "in.jsonl.zst": lambda: compress(".zst", jsonl(ROWS[:300])) + compress(".zst", jsonl(ROWS[300:])),
    "in.csv": lambda: b"\xef\xbb\xbf" + delimited(ROWS),
    "in.tsv": lambda: delimited(ROWS, "\t", "\n"),
    "in.csv.gz": lambda: gzip.compress(delimited(ROWS)),
    "in.parquet": lambda: parquet(ROWS),
    "in.arrow": lambda: arrow(ROWS),
    "stream.arrow": lambda: arrow(ROWS, stream=True),
    "in.feather": lambda: feathered(ROWS),
    "in.tar": lambda: tar(ROWS),
    "in.tar.gz": lambda: gzip.compress(tar(ROWS)),
    "in.tgz": lambda: gzip.compress(tar(ROWS)),
    "in.tar.zst": lambda: compress(".zst", tar(ROWS)),
}


def read(source: Source, next_todo: Callable[[int], int] = lambda position: position) -> list[Chunk]:
    return list(source.chunks(next_todo))


def rows_of(chunks: Sequence[Chunk]) -> dict[int, Any]:
    found = {record.position: record.data for chunk in chunks for record in chunk.records}
    return found | {failed.record.position: failed.reason for chunk in chunks for failed in chunk.failures}


def write(folder: Path, name: str, content: bytes | bytearray) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def next_todo_of(done: set[int]) -> Callable[[int], int]:
    def next_todo(position: int) -> int:
        while position in done:
            position += 1
        return position

    return next_todo


@pytest.mark.parametrize("name", FORMATS)
def test_all_rows_at_their_positions_whatever_is_done(tmp_path: Path, name: str) -> None:
    source = open_source(write(tmp_path, name, FORMATS[name]()))
    chunks = read(source)
    assert [row.get("text", row.get("txt")) for _, row in sorted(rows_of(chunks).items())] == [
        row["text"] for row in ROWS
    ]
    assert sum(chunk.bytes for chunk in chunks) == source.total_bytes == (tmp_path / name).stat().st_size
    assert all(len(chunk.records) <= 512 for chunk in chunks)
    whole = rows_of(chunks)
    lots = random.Random(1)
    for done in (
        set(range(450)),
        set(range(700)),
        {n for n in range(700) if lots.random() < 0.5},
        {0, 499, 500, 699},
    ):
        chunks = read(source, next_todo_of(done))
        assert rows_of(chunks) == {position: row for position, row in whole.items() if position not in done}
        assert sum(chunk.bytes for chunk in chunks) == source.total_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_the_description_is_of_the_content(tmp_path: Path, name: str) -> None:
    content = bytearray(FORMATS[name]())
    path = write(tmp_path, name, content)
    first = open_source(path).describe()
    assert open_source(write(tmp_path / "moved", name, content)).describe() == first
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert files.look_at(path).describe(None)["blake2b"] != first["blake2b"]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("in.jsonl", "in.csv", "in.tsv")])
def test_a_truncated_file_is_named_and_what_came_before_is_kept(tmp_path: Path, name: str) -> None:
    content = FORMATS[name]()
    path = write(tmp_path, name, content[: len(content) * 2 // 3])
    with pytest.raises((ConfigError, JobError), match=rf"{name} is (damaged|truncated)"):
        read(open_source(path))


def test_row_groups_that_are_done_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "in.parquet", parquet(ROWS, group=100))
    asked = []
    iterate = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, row_groups: list[int], **options: Any) -> Any:
        asked.extend(row_groups)
        return iterate(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    read(open_source(path), next_todo_of({*range(350), *range(400, 600)}))
    assert asked == [3, 6]


def test_long_rows_make_small_chunks(tmp_path: Path) -> None:
    rows = [{"text": "x" * 1_000_000} for _ in range(12)]
    for name, content in (("in.parquet", parquet(rows)), ("in.arrow", arrow(rows)), ("in.csv", delimited(rows))):
        chunks = read(open_source(write(tmp_path, name, content)))
        assert sum(len(chunk.records) for chunk in chunks) == 12
        assert max(len(chunk.records) for chunk in chunks) <= 6


# --- CSV ----------------------------------------------------------------------------------------------------------


def test_a_csv_row_that_does_not_fit_the_header_fails_alone(tmp_path: Path) -> None:
    content = b'id,text\r\n1,one\r\n\r\n2,two,more\r\n3\r\n4,"broken"quote\r\n5,\xff\r\n'
    content += b'6,nul\x00byte\r\n7,"multi\r\nline"\r\n8,eight'
    chunks = read(open_source(write(tmp_path, "in.csv", content)))
    assert rows_of(chunks) == {
        0: {"id": "1", "text": "one"},
        1: "ValueError",
        2: "ValueError",
        3: "ValueError",
        4: "UnicodeDecodeError",
        5: {"id": "6", "text": "nul\0byte"},
        6: {"id": "7", "text": "multi\r\nline"},
        7: {"id": "8", "text": "eight"},
    }
    failed = {failed.record.position: failed for chunk in chunks for failed in chunk.failures}
    assert failed[1].message == "the row has 3 fields, the header 2"
    assert failed[1].record.data == ["2", "two", "more"]


def test_a_field_longer_than_the_modules_default_limit(tmp_path: Path) -> None:
    content = b"id,text\n1," + b"x" * 3_000_000 + b"\n2,y\n"
    assert [len(row["text"]) for row in rows_of(read(open_source(write(tmp_path, "in.csv", content)))).values()] == [
        3_000_000,
        1,
    ]


def test_a_header_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in\.csv has two columns named 'a'"):
        read(open_source(write(tmp_path, "in.csv", b"a,b,a\n1,2,3\n")))


# --- compression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_packed_tight_comes_out_in_bounded_blocks(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"in.jsonl{suffix}", compress(suffix, b" " * 50_000_000 + b'{"text":"x"}\n'))
    sizes = [len(block) for block, _ in blocks(files.look_at(path))]
    assert sum(sizes) == 50_000_013
    assert max(sizes) <= files.BLOCK_BYTES
    assert sum(size for _, size in blocks(files.look_at(path))) == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_stream_gives_what_it_has_and_then_says_so(tmp_path: Path, suffix: str) -> None:
    lots = random.Random(0)
    rows = [{"text": lots.randbytes(300).hex()} for _ in range(3000)]
    content = compress(suffix, jsonl(rows))
    chunks = open_source(write(tmp_path, f"in.jsonl{suffix}", content[: len(content) // 2])).chunks(lambda place: place)
    given: list[Any] = []
    with pytest.raises(JobError, match=rf"in\.jsonl{suffix} is truncated"):
        given.extend(record.data for chunk in chunks for record in chunk.records)
    assert len(given) > 500
    assert given == rows[: len(given)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(JobError, match="is damaged"):
        read(open_source(write(tmp_path, f"in.jsonl{suffix}", jsonl(ROWS))))


# --- folders, globs, names ------------------------------------------------------------------------------------------


def test_a_folder_is_one_input_of_all_its_files_by_name(tmp_path: Path) -> None:
    write(tmp_path, "data/b.parquet", parquet(ROWS[500:600]))
    write(tmp_path, "data/a.jsonl", jsonl(ROWS[:500]))
    write(tmp_path, "data/deep/c.csv.gz", gzip.compress(delimited(ROWS[600:])))
    write(tmp_path, "data/_SUCCESS", b"")
    write(tmp_path, "data/.hidden.jsonl", b"{}")
    write(tmp_path, "data/readme.md", b"no data")
    source = open_source(tmp_path / "data")
    chunks = read(source)
    assert [row["id"] for _, row in sorted(rows_of(chunks).items())] == [row["id"] for row in ROWS]
    assert sum(chunk.bytes for chunk in chunks) == source.total_bytes
    assert list(source.describe()["files"]) == ["a.jsonl", "b.parquet", "deep/c.csv.gz"]
    assert rows_of(read(source, lambda position: max(position, 699))) == {699: ROWS[699]}


def test_a_glob_takes_what_it_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write(tmp_path, f"day-{number}/part.jsonl", jsonl(ROWS[number * 10 : number * 10 + 10]))
    write(tmp_path, "day-1/other.csv", b"a\n1\n")
    assert len(rows_of(read(open_source(str(tmp_path / "day-*" / "*.jsonl"))))) == 30
    monkeypatch.chdir(tmp_path)
    assert len(rows_of(read(open_source("day-[02]/*.jsonl")))) == 20
    with pytest.raises(ConfigError, match=r"no file matches none-\*"):
        open_source("none-*.jsonl")


def test_many_files_are_described_together(tmp_path: Path) -> None:
    for number in range(60):
        write(tmp_path, f"{number:02}.jsonl", jsonl([{"n": number}]))
    before = open_source(tmp_path).describe()
    assert before["files"] == 60
    write(tmp_path, "59.jsonl", jsonl([{"n": 61}]))
    assert open_source(tmp_path).describe() != before


def test_an_unknown_format_lists_the_known(tmp_path: Path) -> None:
    write(tmp_path, "in.xls", b"")
    with pytest.raises(ConfigError, match=r"in\.xls from its name; known: \.arrow, .*\.parquet.*input_format"):
        open_source(tmp_path / "in.xls")
    with pytest.raises(ConfigError, match="unknown input format 'xls'; known: arrow, csv"):
        open_source(tmp_path / "in.xls", "xls")
    with pytest.raises(ConfigError, match="unknown scheme 'ftp'; known: s3, gs, hf"):
        open_source("ftp://host/in.jsonl")
    write(tmp_path, "rows", jsonl(ROWS[:3]))
    assert len(rows_of(read(open_source(tmp_path / "rows", "jsonl")))) == 3


# --- images and tars ------------------------------------------------------------------------------------------------


def test_a_folder_of_images_gives_paths(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "deep/c.webp"):
        write(tmp_path, name, name.encode())
    write(tmp_path, "notes.txt", b"")
    source = open_source(tmp_path)
    assert list(rows_of(read(source)).values()) == [
        {"id": name, "path": str(tmp_path / name), "image": str(tmp_path / name)}
        for name in ("a.jpg", "b.PNG", "deep/c.webp")
    ]
    assert (source.total_records, source.total_bytes) == (3, 21)
    before = source.describe()
    write(tmp_path, "a.jpg", b"other")
    assert open_source(tmp_path).describe() != before
    with pytest.raises(JobError, match=r"a\.jpg changed"):
        read(source)


def test_neighbours_in_a_tar_are_one_sample(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        for name, content in (
            ("x/1.jpg", b"JPEG"),
            ("x/1.json", b'{"a": [1]}'),
            ("x/1.seg.png", b"PNG"),
            ("y/1.cls", b"5"),
            ("z.cls", b"five"),
            ("w.txt", "ä".encode()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path = str(tmp_path / "in.tar")
    first = {
        "id": "x/1",
        "path": f"{path}!x/1",
        "jpg": b"JPEG",
        "image": b"JPEG",
        "json": {"a": [1]},
        "seg.png": b"PNG",
    }
    assert rows_of(read(open_source(path))) == {
        0: first,
        1: {"id": "y/1", "path": f"{path}!y/1", "cls": 5},
        2: "ValueError",
        3: {"id": "w", "path": f"{path}!w", "txt": "ä"},
    }


def members(*named: tuple[str, bytes]) -> bytes:
    """A tar archive of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in named:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


TEXTS = [(f"{number}.txt", b"text") for number in range(6)]
BLOCK = 512


def with_a_damaged_header(archive: bytes) -> bytes:
    """The third member's header is no header any more."""
    return archive[: 4 * BLOCK] + bytes(byte ^ 255 for byte in archive[4 * BLOCK : 5 * BLOCK]) + archive[5 * BLOCK :]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("archive", "message", "read"),
    [
        (with_a_damaged_header(members(*TEXTS)), "the header of a member is no header", 1),
        (members(*TEXTS) + members(("z.txt", b"z")), "something follows its end mark", 6),
        (members(*TEXTS)[: 12 * BLOCK], "truncated: it has no end mark", 5),
        (members(*TEXTS)[: 9 * BLOCK + 1], "unexpected end of data", 4),
    ],
)
def test_a_tar_that_would_end_early_is_damaged(
    tmp_path: Path, archive: bytes, message: str, read: int, packed: bool
) -> None:
    content, name = (gzip.compress(archive), "in.tar.gz") if packed else (archive, "in.tar")
    chunks: list[Chunk] = []
    with pytest.raises(JobError, match=message):
        chunks.extend(open_source(write(tmp_path, name, content)).chunks(lambda place: place))
    # Without the next header, the last sample may lack members.
    assert [row["id"] for row in rows_of(chunks).values()] == [str(number) for number in range(read)]


def test_a_tar_may_be_filled_up_with_zeros(tmp_path: Path) -> None:
    path = write(tmp_path, "in.tar", members(*TEXTS) + bytes(3 * BLOCK + 7))
    assert len(rows_of(read(open_source(path)))) == 6


def test_a_member_that_replaces_another_fails_its_sample(tmp_path: Path) -> None:
    named = [("a.txt", b"x"), ("a.TXT", b"y"), ("b.id", b"7"), ("c.path", b"p"), ("d.json", b"[" * 100_000)]
    chunks = read(open_source(write(tmp_path, "in.tar", members(*named, ("e.txt", b"z")))))
    assert {failed.record.position: failed.message for chunk in chunks for failed in chunk.failures} == {
        0: "it has more than one member a.TXT: pack each once",
        1: "its member b.id would replace the column 'id': rename it",
        2: "its member c.path would replace the column 'path': rename it",
        3: "maximum recursion depth exceeded while decoding a JSON array from a unicode string",
    }


def test_arrow_streams_one_after_the_other_are_all_read(tmp_path: Path) -> None:
    first, second = arrow(ROWS[:3], stream=True), arrow(ROWS[3:5], stream=True)
    path = write(tmp_path, "in.arrow", first + second)
    assert [row["id"] for row in rows_of(read(open_source(path))).values()] == [row["id"] for row in ROWS[:5]]
    write(tmp_path, "in.arrow", first + b"something else")
    with pytest.raises(JobError, match="damaged"):
        read(open_source(path))
