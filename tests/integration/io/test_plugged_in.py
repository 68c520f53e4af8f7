"""Sinks, sources and formats of other packages, found by their entry points, and what broken ones cost."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.command import ROOT, headrace

from headrace import plugins as registry
from headrace.errors import ConfigError
from headrace.io.formats.known import written_formats
from headrace.io.formats.strict_json import StrictJson
from headrace.io.sinks.tables import TableSink
from headrace.io.sinks.targets import find_target
from headrace.io.sources.opening import open_source
from headrace.io.storage.addresses import display_name, parse_table
from headrace.plugins import load
from headrace.testing import check_table_store

PAGE = (ROOT / "docs" / "sinks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
SOURCE = """
import json
from dataclasses import dataclass
from pathlib import Path
from headrace.io.base import SourcePlugin
from headrace.io.formats.jsonl import JsonlFormat
from headrace.io.formats.known import Format
from headrace.io.sources.in_memory import SequenceSource

class Crate(list):
    pass

ROWS = [{"id": n, "text": f"text {n}"} for n in range(3)]
CRATE = SourcePlugin(open=lambda crate, query: SequenceSource(list(crate)))
LAKE = SourcePlugin(open=lambda address, query: SequenceSource(ROWS))
BOX = Format(name="box", reader=JsonlFormat, compressible=True)
"""
ENTRIES = """
[headrace.sinks]
shelf = foreign_shelf:SHELF
wreck = foreign_wreck:WRECK
number = foreign_shelf:json

[headrace.sources]
lake = foreign_lake:LAKE
/_lake = foreign_lake:LAKE
foreign_lake.Crate = foreign_lake:CRATE
wreck = foreign_wreck:WRECK

[headrace.formats]
box = foreign_lake:BOX
.bx = foreign_lake:BOX
wreck = foreign_wreck:WRECK
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with plugins, some of which cannot be imported."""
    site = tmp_path / "site"
    folder = site / "foreign-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    (site / "foreign_shelf.py").write_text(BLOCKS[0])
    (site / "foreign_lake.py").write_text(SOURCE)
    (site / "foreign_wreck.py").write_text("raise RuntimeError('sunk')\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    registry.forget()
    monkeypatch.chdir(tmp_path)
    yield site
    registry.forget()
    for name in ("foreign_shelf", "foreign_lake", "foreign_wreck"):
        sys.modules.pop(name, None)


def write_docs(folder: Path, name: str = "docs.jsonl") -> None:
    titles = ("Wheels", "Mills", "Weirs")
    rows = [{"id": n, "title": title, "text": f"{title} turn."} for n, title in enumerate(titles)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_sink_of_the_page_is_an_output_of_the_command_line(foreign: Path, tmp_path: Path) -> None:
    write_docs(tmp_path)
    [block] = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    command, said = block.removeprefix("$ headrace ").splitlines()
    arguments = [argument.strip("'") for argument in command.split()]
    status, output = headrace(*arguments, "--engine", "headrace.testing:FakeEngine", folder=tmp_path)
    assert (status, output.splitlines()[-1]) == (0, said)
    rows = json.loads((tmp_path / "books.vectors.json").read_text())
    assert [row["title"] for row in rows.values()] == ["Wheels", "Mills", "Weirs"]
    assert "foreign" not in display_name("shelf://me:foreign@host/books?table=vectors")


def test_the_sink_of_the_page_keeps_the_contract(foreign: Path, tmp_path: Path) -> None:
    sink, path = load("sinks", "shelf", TableSink), tmp_path / "books.t.json"
    address = parse_table("shelf:///books?table=t")
    check_table_store(lambda: sink.open(address, StrictJson(str)), lambda: json.loads(path.read_text()).values())


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("kept[len(kept)] = rows[0]", "put must replace the row with an id"),
        ("kept.clear()", "put must keep what an earlier process has put|put must insert rows"),
    ],
)
def test_a_store_that_breaks_the_contract_is_told(broken: str, says: str) -> None:
    kept: dict[object, object] = {}

    class Broken:
        def count(self, columns: object) -> int | None:
            return len(kept) or None

        def put(self, rows: list[dict[str, object]]) -> None:
            exec(broken, {"kept": kept, "rows": rows})
            kept.update({row["id"]: row for row in rows})

        def close(self) -> None:
            pass

    with pytest.raises(AssertionError, match=says):
        check_table_store(Broken, lambda: list(kept.values()))  # type: ignore[arg-type]


def records(source: object) -> list[object]:
    return [record.data["id"] for chunk in open_source(source).chunks(lambda at: at) for record in chunk.records]


def test_sources_are_found_by_scheme_class_and_folder(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "pond" / "_lake").mkdir(parents=True)
    for source in ("lake://host/rows", "pond", tmp_path / "pond"):
        assert records(source) == [0, 1, 2]
    import foreign_lake  # type: ignore[import-not-found]

    assert records(foreign_lake.Crate(foreign_lake.ROWS[1:])) == [1, 2]


def test_files_are_read_by_another_package_s_format(foreign: Path, tmp_path: Path) -> None:
    for name in ("in.box", "in.BX"):
        write_docs(tmp_path, name)
        assert records(name) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"box is only read; end it in one of \.csv"):
        find_target("out.box")


def test_a_broken_plugin_costs_only_itself(foreign: Path, tmp_path: Path) -> None:
    write_docs(tmp_path)
    assert records("docs.jsonl") == [0, 1, 2]
    assert find_target("out.jsonl").format == "jsonl"
    assert "wreck" not in written_formats()
    assert not {"foreign_wreck", "foreign_shelf", "foreign_lake"} & {*sys.modules} - {"foreign_lake"}
    for use in (lambda: find_target("wreck://x?table=t"), lambda: open_source("wreck://x"), lambda: records("a.wreck")):
        (tmp_path / "a.wreck").touch()
        with pytest.raises(ConfigError, match=r"'wreck' of package foreign cannot be imported: RuntimeError: sunk"):
            use()
    with pytest.raises(ConfigError, match="sink 'number' of package foreign is a module; it must be a SinkPlugin"):
        find_target("number://x")


def test_what_nobody_takes_is_refused_with_what_is_known(foreign: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'foo'; known: s3, .*shelf.*sqlite"):
        find_target("foo://host/rows")
    with pytest.raises(ConfigError, match=r"lake can only be read; write to one of .*shelf"):
        find_target("lake://host/rows?table=t")
    with pytest.raises(ConfigError, match="shelf is an output only"):
        open_source("shelf://host/rows?table=t")
    with pytest.raises(ConfigError, match=r"unknown input format 'jsonx'; known: arrow.*box"):
        open_source("pyproject.toml", "jsonx") if Path("pyproject.toml").touch() is None else None
