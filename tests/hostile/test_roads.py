"""By columns or one by one: the hostile inputs come to the same outputs and dead letters.

`scripts/hostile REVISION` compares all of them with an earlier revision.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.hostile import engines
from tests.hostile.corpus import Case, cases
from tests.hostile.differences import shown
from tests.hostile.outcomes import run
from tests.hostile.tables import ROWS

from headrace.jobs.pipeline.job import Job

pytest.importorskip("pyarrow")

EVERY = 13
"""One job in so many is compared: every setting has its turn."""
CASES: dict[str, list[Case]] = {}
for one in list(cases())[::EVERY]:
    CASES.setdefault("/".join(one.name.split("/")[:2]) if one.name[0] in "jpt" else one.name.split("/")[0], []).append(
        one
    )


def difference(case: Case, monkeypatch: pytest.MonkeyPatch) -> str:
    """What differs between the two ways; empty for nothing."""
    by_columns = run(case)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "in_blocks", False)
        return shown(run(case), by_columns)


@pytest.mark.parametrize("quarter", [0, *(pytest.param(more, marks=pytest.mark.thorough) for more in (1, 2, 3))])
@pytest.mark.parametrize("group", CASES)
def test_rows_come_to_the_same_in_blocks_and_one_by_one(
    group: str, quarter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [f"{case.name}\n{text}" for case in CASES[group][quarter::4] if (text := difference(case, monkeypatch))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name", ["pandas/str-ids-as-id", "polars/text-ids-of-polars-as-id", "arrow/reader", "datasets/plain"]
)
def test_tables_in_memory_go_by_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    prepare_column = engines.Columns.prepare_column

    def seen(self: engines.Columns, inputs: Any) -> Any:
        given.append(inputs)
        return prepare_column(self, inputs)

    monkeypatch.setattr(engines.Columns, "prepare_column", seen)
    case = next(one for one in cases() if one.name.startswith(f"table/{name}#"))
    run(replace(case, settings={"engine": engines.Columns, "task": "embed", "sink": "out.jsonl"}))
    assert sum(map(len, given)) == ROWS
    assert all(hasattr(inputs, "null_count") for inputs in given)


def test_the_two_ways_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    prepare_column = engines.Columns.prepare_column

    def counted(self: engines.Columns, inputs: Any) -> Any:
        prepared.append(len(inputs))
        return prepare_column(self, inputs)

    monkeypatch.setattr(engines.Columns, "prepare_column", counted)
    [case] = [one for one in cases() if one.name == "jsonl/whole/no-newline#0"]
    run(case)
    assert sum(prepared) == 7
    monkeypatch.setattr(Job, "in_blocks", False)
    run(case)
    assert sum(prepared) == 7
