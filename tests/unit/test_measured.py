"""No figure without its measurement: each table of docs/benchmarks.md is one that a benchmark has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import common

ROOT = Path(__file__).parents[2]


def tables(text: str) -> list[list[list[str]]]:
    """Markdown tables as rows of cells, the header first."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not set("".join(cells)) <= {"-"}:
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def written() -> list[list[list[str]]]:
    """What the benchmarks left in `results/`, in the same form."""
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    return [[list(result["rows"][0]), *(list(map(cell, row.values())) for row in result["rows"])] for result in results]


def cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


MEASURED = tables((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))


def test_there_are_tables() -> None:
    assert len(MEASURED) > 3


@pytest.mark.parametrize("table", MEASURED, ids=lambda table: table[0][0])
def test_a_table_is_as_a_benchmark_wrote_it(table: list[list[str]]) -> None:
    assert table in written(), "run `scripts/bench` and copy what it prints"


def test_a_quick_run_writes_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmark", "--quick"])
    common.report("some", "Some", ["way"], [["one"]])
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["benchmark"])
    common.report("some", "Some", ["way"], [["one"]])
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


def test_figures_of_another_cpu_do_not_replace_those_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"cpu": "one", "instructions": ["avx2", "amx_bf16", "amx_int8"]}
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmark"])
    monkeypatch.setattr(common, "cpu_facts", lambda: facts)
    common.report("some", "Some", ["way"], [["one"]])
    first = (tmp_path / "some.json").read_text()
    facts = facts | {"cpu": "another"}
    common.report("some", "Some", ["way"], [["two"]])
    facts = facts | {"ATEN_CPU_CAPABILITY": "avx2"}
    common.report("some", "Some", ["way"], [["three"]])
    assert (tmp_path / "some.json").read_text() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some-amx_bf16.json", "some-avx2.json", "some.json"]
