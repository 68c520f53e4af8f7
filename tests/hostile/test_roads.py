"""By columns or one by one: the hostile inputs come to the same outputs and dead letters.

`scripts/hostile REVISION` compares all of them with an earlier revision.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.hostile.corpus import Case, cases
from tests.hostile.outcomes import run

from headrace.jobs.pipeline.job import Job

pytest.importorskip("pyarrow")

EVERY = 13
"""One job in so many is compared: every setting has its turn."""
CASES: dict[str, list[Case]] = {}
for one in list(cases())[::EVERY]:
    CASES.setdefault("/".join(one.name.split("/")[:2]) if one.name[0] in "jp" else one.name.split("/")[0], []).append(one)


def differences(case: Case, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, object]:
    """The parts of an outcome that differ between the two ways, each as it is."""
    by_columns = run(case)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "in_blocks", False)
        one_by_one = run(case)
    parts = {*by_columns, *one_by_one}
    found = {part: (by_columns.get(part), one_by_one.get(part)) for part in parts}
    return {part: both for part, both in found.items() if both[0] != both[1]}


@pytest.mark.parametrize("group", CASES)
def test_rows_come_to_the_same_in_blocks_and_one_by_one(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {case.name: differences(case, monkeypatch) for case in CASES[group]}
    assert {name: parts for name, parts in found.items() if parts} == {}
