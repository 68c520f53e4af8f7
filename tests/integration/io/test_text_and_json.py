"""JSON arrays, lines of text, and texts with another delimiter or encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

import headrace
from headrace.errors import ConfigError, JobError
from headrace.io.formats import json_files
from headrace.io.sources.opening import TextRules, open_source


def rows(path: Path, format: str | None = None, **rules: Any) -> list[Any]:  # noqa: A002
    found: list[Any] = []
    for chunk in open_source(path, format, rules=TextRules(**rules)).chunks(lambda position: position):
        found += [(record.position, record.data) for record in chunk.records]
        found += [(failed.record.position, failed.reason) for failed in chunk.failures]
    return sorted(found, key=lambda row: row[0])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.dictionaries(st.text(), values) | values), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40)
)
def test_an_array_comes_as_the_json_module_reads_it(
    tmp_path_factory: pytest.TempPathFactory, array: list[Any], indent: int | None, ascii_only: bool, piece: int
) -> None:
    path = tmp_path_factory.mktemp("json") / "in.json"
    text = json.dumps(array, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:  # pieces that end anywhere, also inside of a number or a character
        patch.setattr(
            json_files, "blocks", lambda _: ((text[at : at + piece], piece) for at in range(0, len(text), piece))
        )
        found = rows(path, "json")
    assert [position for position, _ in found] == list(range(len(array)))
    for (_, row), value in zip(found, array, strict=True):
        assert row == value if isinstance(value, dict) else row == "TypeError"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": ', "at character"),
        ('[{"a": 1}', "the array is not closed|comma"),
        ('[{"a": 1} {"a": 2}]', "a comma or the end of the array is missing"),
        ('[{"a": 1}] x', "follows the end of the array"),
        ('[{"a": 1}, ' + "[" * 100_000, "at character"),
    ],
)
def test_a_damaged_array_gives_what_comes_before(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(text)
    chunks = open_source(tmp_path / "in.json").chunks(lambda position: position)
    assert [record.data for record in next(chunks).records][:1] == [{"a": 1}]
    with pytest.raises(JobError, match=message):
        list(chunks)


def test_json_lines_under_that_name_are_lines(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"a": 1}\nbad\n{"a": 2}\n')
    assert rows(tmp_path / "in.json") == [(0, {"a": 1}), (1, "JSONDecodeError"), (2, {"a": 2})]
    (tmp_path / "one.json").write_text('{\n "a": 1\n}\n')
    assert rows(tmp_path / "one.json") == [(0, {"a": 1})]


def test_lines_of_text_and_their_resume(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes("one\r\n\n  \nzwölf".encode() + b"\n\xff\nlast")
    found = rows(tmp_path / "in.txt")
    assert found == [(0, {"text": "one"}), (1, {"text": "zwölf"}), (2, "UnicodeDecodeError"), (3, {"text": "last"})]
    source = open_source(tmp_path / "in.txt")
    assert [row.data["text"] for chunk in source.chunks(lambda at: max(at, 3)) for row in chunk.records] == ["last"]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "shift-jis"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    word = "日本" if encoding == "shift-jis" else "größe"
    (tmp_path / "in.csv").write_text(f"text;n\n{word};1\n", encoding)
    assert rows(tmp_path / "in.csv", delimiter=";", encoding=encoding) == [(0, {"text": word, "n": "1"})]


def test_what_is_not_in_the_encoding_costs_its_row(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\n\x81\nthree\n")
    assert [type(row) for _, row in rows(tmp_path / "in.txt", encoding="cp1252")] == [dict, str, dict]


def test_both_roads_read_another_delimiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.jobs.pipeline.job import Job

    (tmp_path / "in.csv").write_text('text|n\n"a|b"|1\nc,d|2\ne\n')

    def run() -> tuple[str, str]:
        headrace.run(
            tmp_path / "in.csv", sink=tmp_path / "out.csv", engine="headrace.testing:FakeEngine", task="embed",
            input_delimiter="|", keep_columns="text,n", overwrite=True, progress=False, max_error_rate=1,
        )  # fmt: skip
        return (tmp_path / "out.csv").read_text(), (tmp_path / "out.errors.jsonl").read_text()

    by_columns = run()
    monkeypatch.setattr(Job, "in_blocks", False)
    assert run() == by_columns
    assert '"a|b"' not in by_columns[0]
    assert "a|b,1," in by_columns[0]


@pytest.mark.parametrize(
    ("name", "rules", "message"),
    [
        ("a.jsonl", {"delimiter": ";"}, "is for csv, and the input is jsonl"),
        ("a.csv", {"delimiter": ";;"}, "one ASCII character"),
        ("a.csv", {"encoding": "latin-99"}, "none that Python knows"),
        ("a.csv", {"encoding": "base64"}, "none that Python knows"),
        ("a.parquet", {"encoding": "latin-1"}, "is for text, and the input is parquet"),
    ],
)
def test_rules_that_do_not_fit_are_refused(name: str, rules: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text\na\n")
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path / name, rules=TextRules(**rules))
    with pytest.raises(ConfigError, match="the input is none"):
        open_source([{"text": "a"}], rules=TextRules(**rules))


def test_text_and_json_beside_data_or_images_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("hello\n")
    (tmp_path / "info.json").write_text("[]")
    assert rows(tmp_path) == [(0, {"text": "hello"})]
    (tmp_path / "data.csv").write_text("text\na\n")
    assert rows(tmp_path) == [(0, {"text": "a"})]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "idna", "undefined"])
def test_a_file_that_is_not_in_the_encoding_at_all_is_refused(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=rf'in.jsonl cannot be read with input_encoding="{encoding}": .*UTF-8'):
        headrace.run(tmp_path / "in.jsonl", sink="list", engine="headrace.testing:FakeEngine", input_encoding=encoding)
