"""What docs/tables.md shows and says is true, and the notebook runs."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import ROOT, headrace

from headrace.app.jobs.tables import is_table_kind
from headrace.io.base import SourcePlugin
from headrace.io.sinks.tables import TableSink
from headrace.io.sinks.targets import SinkPlugin
from headrace.io.storage.addresses import is_address, scheme_of
from headrace.plugins import working

PAGE = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    table = PAGE.partition("| table | as input |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_names_each_source_and_sink_with_what_it_needs() -> None:
    quoted = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows()]
    databases = {
        name for name, plugin in working("sources", SourcePlugin).items() if plugin.takes_query and "." not in name
    }
    sources = {scheme_of(name) for row in quoted for name in row[1] if is_address(name)} - {"iceberg"}
    assert sources == databases - {"mariadb", "postgres"} and "MariaDB" in PAGE
    stores = {name for name, plugin in working("sinks", SinkPlugin).items() if isinstance(plugin, TableSink)}
    assert {scheme_of(name) for row in quoted for name in row[2] if is_address(name)} == stores - {"postgres"}
    kinds = {name.split('"')[1] for row in quoted for name in row[2] if name.startswith("sink=")}
    assert kinds == {"pandas", "polars", "arrow", "list", "numpy"} and all(map(is_table_kind, kinds))
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra for row in quoted for need in row[3] for extra in re.findall(r"headrace\[(\w+)\]", need)}
    assert (
        extras
        == {"io", "sql", "duckdb", "qdrant", "lancedb", "delta", "iceberg"}
        <= set(project["optional-dependencies"])
    )


def test_the_python_block_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    [(block, printed)] = re.findall(r"^```python\n(.*?)^```$.*?^```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    exec(compile(block, "docs/tables.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_console_block_says_what_is_shown(tmp_path: Path) -> None:
    titles = {"a": "Wheels", "b": "Mills", "c": "Weirs"}
    lines = (json.dumps({"id": one, "title": title, "text": f"{title} turn."}) for one, title in titles.items())
    (tmp_path / "docs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    block = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)[-1]
    for command, said in re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", block, flags=re.MULTILINE):
        program, *arguments = shlex.split(command)
        if program == "headrace":
            status, output = headrace(*arguments, folder=tmp_path)
            assert (status, output.splitlines()[-1] + "\n") == (0, said)
        else:  # sqlite3's own program may not be installed
            file, query = arguments
            with contextlib.closing(sqlite3.connect(tmp_path / file)) as connection:
                assert "".join("|".join(map(str, row)) + "\n" for row in connection.execute(query)) == said


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(ROOT / "examples" / "table.ipynb", as_version=4)
    progress = f"headrace.run(['a', 'b'], sink={str(tmp_path / 'out.jsonl')!r}, engine=lambda texts: texts)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"import headrace\n{progress}"))
    nbclient.NotebookClient(notebook, timeout=100).execute()
    (shown,) = [output for output in notebook.cells[0].outputs if output["output_type"] == "display_data"]
    assert "<progress" in shown["data"]["text/html"]
    assert ">records</td>" in notebook.cells[0].outputs[-1]["data"]["text/html"]  # the report shows itself
    *_, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert last.outputs[0]["data"]["text/plain"].splitlines()[1].split()[1] == "Mills"
