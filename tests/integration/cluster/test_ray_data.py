"""Headrace as a stage of Ray Data."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("HEADRACE_TEST_CLUSTER" not in os.environ, reason="takes minutes: scripts/test-cluster runs it"),
]


def test_rows_get_their_outputs_and_a_bad_one_its_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data: Any = pytest.importorskip("ray.data")
    from headrace.cluster.ray.data import Stage
    from headrace.testing import FakeEngine

    data.DataContext.get_current().enable_progress_bars = False
    rows = [{"n": n, "text": f"text {n}" if n != 50 else "far too long a text"} for n in range(300)]
    options = {"max_model_len": 3, "on_too_long": "error"}
    staged = data.from_items(rows).map_batches(
        Stage,
        fn_constructor_kwargs={"task": "embed", "engine": "headrace.testing:FakeEngine", **options},
        batch_size=64,
        compute=data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
    )
    done = sorted(staged.take_all(), key=lambda row: int(row["n"]))
    fake = FakeEngine()
    assert [row["n"] for row in done] == list(range(300))
    assert list(done[7]["output"]) == fake.vector("text 7")
    assert done[7]["error"] is None
    assert [row["n"] for row in done if row["error"] is not None] == [50]
    assert "the text has 5 words, more than the 3 allowed" in done[50]["error"]
    assert done[50]["output"] is None
