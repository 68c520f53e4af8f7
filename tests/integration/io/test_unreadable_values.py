"""Values that Python cannot hold: each fails its own record, and only if the job uses its column."""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError, HeadraceError
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import SequenceSource
from headrace.io.sources.joined import JoinedSource, StepOutput
from headrace.jobs.settings import Limits

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ds = pytest.importorskip("pyarrow.dataset")
pd = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
pytest.importorskip("pyarrow.ipc")


def texts(*values: bytes) -> Any:
    """A column of texts that need not be UTF-8."""
    ends = np.cumsum([0, *map(len, values)]).astype("i4")
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values))]
    )


ROWS = pa.table(
    {
        "text": texts(b"good", b"\xff\xfe", b"fine", b"ok"),
        "other": texts(b"\xff", b"a", b"b", b"c"),
        "when": pa.array([0, 1, 2, 10**17], pa.timestamp("ms")),
        "day": pa.array([0, 1, 10**9, 3], pa.date32()),
        "time": pa.array([0, 1, 2, 3000], pa.time64("ns")),
        "zone": pa.array([0, 1, 2, 3], pa.timestamp("us", "No/Where")),
    }
)


def run(source: Any, out: Path, **given: Any) -> tuple[int, dict[int, str]]:
    """How many records are ok, and the messages of the others."""
    given = {"engine": lambda inputs: [len(one) for one in inputs], "progress": False} | given
    report = headrace.run(source, sink=out, limits=Limits(max_error_rate=1), **given)
    errors = out.with_name(f"{out.stem}.errors.jsonl")
    letters = map(json.loads, errors.read_text().splitlines() if errors.exists() else [])
    return report.ok, {letter["position"]: letter["message"] for letter in letters}


def _same(values: list[object]) -> list[object]:
    return values


def sources(folder: Path) -> Mapping[str, Any]:
    pq.write_table(ROWS, folder / "in.parquet", row_group_size=2)
    for name in ("in.arrow", "in.feather"):
        with pa.ipc.new_file(folder / name, ROWS.schema) as file:
            file.write_table(ROWS)
    datasets = pytest.importorskip("datasets")
    found: dict[str, Any] = {name: folder / f"in.{name}" for name in ("parquet", "arrow", "feather")}
    found |= {"table": ROWS, "batch": ROWS.to_batches()[0], "reader": ROWS.to_reader()}
    found |= {"dataset": ds.dataset(folder / "in.parquet"), "datasets": datasets.Dataset(ROWS.drop_columns(["zone"]))}
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder / "delta"), ROWS.select(["text", "other"]))
    return found | {"delta": folder / "delta"}


@pytest.mark.parametrize(
    "source", ["parquet", "arrow", "feather", "table", "batch", "reader", "dataset", "datasets", "delta"]
)
def test_only_the_record_that_uses_the_value_fails(tmp_path: Path, source: str) -> None:
    ok, letters = run(sources(tmp_path)[source], tmp_path / "out.jsonl")
    assert (ok, list(letters)) == (3, [1])
    assert letters[1].startswith("column 'text' cannot be read: 'utf-8' codec can't decode byte 0xff in position 0")
    assert "row 1 counted from 0" in letters[1]


def test_the_message_names_file_row_group_and_row(tmp_path: Path) -> None:
    file = sources(tmp_path)["parquet"]
    _, letters = run(file, tmp_path / "out.jsonl", text_column="day", engine=lambda days: [str(day) for day in days])
    assert list(letters) == [2]
    assert f"{file}, row group 1, row 2 counted from 0, type date32[day]" in letters[2]


def test_ids_templates_and_functions_use_the_value_too(tmp_path: Path) -> None:
    file = sources(tmp_path)["parquet"]
    assert list(run(file, tmp_path / "id.jsonl", id_column="other")[1]) == [0, 1]
    assert list(run(file, tmp_path / "template.jsonl", prompt_template="{other} {text}")[1]) == [0, 1]
    ok, letters = run(file, tmp_path / "map.jsonl", prepare=lambda row: row)
    assert ok == 0
    assert all(message.endswith("a function (prepare, finish) gets whole rows") for message in letters.values())


def test_a_kept_value_is_copied_where_the_format_holds_it(tmp_path: Path) -> None:
    file = sources(tmp_path)["parquet"]
    keep = {"keep_columns": ["when", "day", "time"]}
    ok, letters = run(file, tmp_path / "out.parquet", **keep)
    assert (ok, list(letters)) == (3, [1])
    read = pq.read_table(tmp_path / "out.parquet")
    for name in keep["keep_columns"]:
        assert read[name].combine_chunks().equals(ROWS[name].combine_chunks().take(pa.array([0, 2, 3])))
    ok, letters = run(file, tmp_path / "lines.jsonl", **keep)
    assert (ok, list(letters)) == (1, [1, 2, 3])
    assert letters[2].startswith("column 'day' is or holds a value of type date32[day] that cannot be written as text")
    assert f"{file}, row group 1, row 2" in letters[2]
    assert json.loads((tmp_path / "lines.jsonl").read_text())["time"] == "00:00:00"
    assert list(run(file, tmp_path / "text.parquet", keep_columns=["other"])[1]) == [0, 1]
    with pytest.raises(ConfigError, match=r"cannot keep column 'zone': .*timestamp\[us, tz=No/Where\]"):
        run(file, tmp_path / "zone.jsonl", keep_columns=["zone"])


def test_a_finished_job_is_recognized_and_a_retry_fails_alike(tmp_path: Path) -> None:
    file = sources(tmp_path)["parquet"]
    assert run(file, tmp_path / "out.jsonl")[0] == 3
    assert run(file, tmp_path / "out.jsonl")[0] == 0
    assert run(file, tmp_path / "out.jsonl", retry=True) == run(file, tmp_path / "out.jsonl")


def test_frames_of_other_libraries(tmp_path: Path) -> None:
    good = ROWS.select(["when", "day", "time"]).append_column("text", pa.array(["a", "b", "c", "d"]))
    frame = good.to_pandas(types_mapper=pd.ArrowDtype)
    assert run(frame, tmp_path / "pandas.jsonl") == (4, {})
    assert list(run(frame, tmp_path / "day.jsonl", text_column="day", engine=lambda days: list(map(str, days)))[1]) == [
        2
    ]
    other = polars.from_arrow(good)
    assert run(other, tmp_path / "polars.jsonl") == (4, {})
    assert run(other.lazy(), tmp_path / "lazy.jsonl") == (4, {})
    ok, letters = run(other, tmp_path / "time.jsonl", text_column="time", engine=lambda times: [str(t) for t in times])
    assert (ok, list(letters)) == (2, [1, 2])
    assert "would lose data" in letters[1]


def test_a_column_of_texts_alone(tmp_path: Path) -> None:
    for number, column in enumerate((ROWS["text"], ROWS["text"].combine_chunks())):
        ok, letters = run(column, tmp_path / f"{number}.jsonl")
        assert (ok, list(letters)) == (3, [1])
        assert "'utf-8' codec can't decode" in letters[1]


def test_texts_of_sqlite_that_are_not_utf_8(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    with sqlite3.connect(tmp_path / "a.db") as base:
        base.execute("create table t (id integer, text text, other text)")
        base.execute("insert into t values (1, 'a', cast(x'ff' as text)), (2, cast(x'fe' as text), 'b'), (3, 'c', 'd')")
    base.close()
    address, query = f"sqlite:////{tmp_path}/a.db", "select * from t order by id"
    ok, letters = run(address, tmp_path / "out.jsonl", sql=query)
    assert (ok, list(letters)) == (2, [1])
    assert letters[1].startswith("column 'text' cannot be read: 'utf-8' codec can't decode byte 0xfe")


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["a" * 1000, "b" * 1000]}), tmp_path / "in.parquet", row_group_size=1, compression="zstd",
        use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    offset = pq.ParquetFile(tmp_path / "in.parquet").metadata.row_group(1).column(0).data_page_offset
    content = bytearray((tmp_path / "in.parquet").read_bytes())
    content[offset + 20 : offset + 60] = b"\xaa" * 40
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(HeadraceError, match=r"in\.parquet is damaged or truncated in row group 1"):
        run(tmp_path / "in.parquet", tmp_path / "out.jsonl")


class Counted(str):
    """A name that counts how often names are compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)  # type: ignore[no-any-return]


def test_the_names_of_a_wide_table_are_not_all_compared_with_each_other(tmp_path: Path) -> None:
    check_names([Counted(f"c{n}") for n in range(5000)], "the table")
    assert Counted.compared < 5000
    with pytest.raises(ConfigError, match="two columns named 'c1'"):
        check_names([*(f"c{n}" for n in range(5000)), "c1"], "the table")
    wide = pa.table({"text": ["a", "b"], **{f"c{n}": [n, n] for n in range(5000)}})
    pq.write_table(wide, tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.parquet", keep_columns=["c7"]) == (2, {})
    assert pq.read_table(tmp_path / "out.parquet")["c7"].to_pylist() == [7, 7]


def test_a_dead_letter_of_a_column_to_copy_has_the_id_of_its_record(tmp_path: Path) -> None:
    rows = ROWS.append_column("id", pa.array([10, 20, 30, 40]))
    run(rows, tmp_path / "out.jsonl", keep_columns=["other"], engine=lambda inputs: [0] * len(inputs))
    [bad, other] = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert [(one["position"], one["id"]) for one in (bad, other)] == [(0, 10), (1, 20)]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    "chosen", [{}, {"dedupe": True}, {"prompt_template": "{text}"}, {"limit": 4}, {"shard": "0/1"}]
)
def test_a_damaged_column_harms_the_jobs_that_use_it(tmp_path: Path, group: int, chosen: dict[str, Any]) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": list("abcd"), "junk": [0.1, 0.2, 0.3, 0.4]}), source, row_group_size=2)
    place = pq.read_metadata(source).row_group(group).column(1).dictionary_page_offset
    content = bytearray(source.read_bytes())
    content[place : place + 20] = b"\xff" * 20
    source.write_bytes(content)
    assert run(source, tmp_path / "out.jsonl", **chosen) == (4, {})
    for more in ({"keep_columns": "*"}, {"keep_columns": "junk"}, {"finish": lambda row, output: row["junk"]}):
        with pytest.raises(HeadraceError, match=rf"column 'junk' of .* is damaged or truncated in row group {group}"):
            run(source, tmp_path / "more.jsonl", overwrite=True, **chosen, **more)


def test_a_damaged_column_harms_no_step_that_does_not_use_it(tmp_path: Path) -> None:
    source, options = tmp_path / "in.arrow", pa.ipc.IpcWriteOptions(compression="zstd")
    table = pa.table({"text": list("abcd") * 300, "junk": [0.5] * 1200})
    with pa.ipc.new_file(source, table.schema, options=options) as writer:
        writer.write_table(table)
    content = bytearray(source.read_bytes())
    place = content.rindex(b"\x28\xb5\x2f\xfd")
    content[place : place + 10] = bytes(10)
    source.write_bytes(content)
    engine: Any = "headrace.testing:FakeEngine"
    steps = [{"name": "first", "engine": engine}, {"name": "last", "engine": engine}]
    headrace.run(source, sink=tmp_path / "out.parquet", steps=steps, progress=False)
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 1200


def test_of_the_output_of_a_step_only_its_column_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    pq.write_table(pa.table({"id": [0.1, 0.2], "first": [7, 8]}), path)
    place = pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 20] = b"\xff" * 20
    path.write_bytes(content)
    output = StepOutput("first", "first", path, tmp_path / "none.jsonl", "parquet")
    chunks = JoinedSource(SequenceSource(["a", "b"]), [output], {}).chunks(lambda position: position)
    assert [record.data["first"] for chunk in chunks for record in chunk.records] == [7, 8]


@pytest.mark.parametrize("plain_footer", [False, True])
def test_an_encrypted_file_is_named_as_such(tmp_path: Path, plain_footer: bool) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc, name-defined]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
            return base64.b64decode(wrapped)

    how = encryption.EncryptionConfiguration("footer", column_keys={"k": ["text"]}, plaintext_footer=plain_footer)
    made = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({"id": [1, 2], "text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "in.parquet", table.schema, encryption_properties=made) as file:
        file.write_table(table)
    named = r"column 'text' of .*in\.parquet" if plain_footer else r"in\.parquet"
    with pytest.raises(HeadraceError, match=f"{named} is encrypted, and Headrace has no keys: decrypt the file first"):
        run(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    if plain_footer:
        assert run(tmp_path / "in.parquet", tmp_path / "id.jsonl", text_column="id", engine=_same) == (2, {})


def test_an_unknown_time_zone_has_its_way_out(tmp_path: Path) -> None:
    pq.write_table(ROWS.select(["zone"]), tmp_path / "in.parquet")
    _, letters = run(tmp_path / "in.parquet", tmp_path / "out.jsonl", text_column="zone")
    assert "its time zone is not known here; install tzdata if it exists, or write the column in UTC" in letters[0]
    with pytest.raises(ConfigError, match=r"values, of type timestamp\[us, tz=No/Where\] \(.* zone is not known here"):
        run(tmp_path / "in.parquet", tmp_path / "kept.jsonl", text_column="zone", keep_columns=["zone"])
