"""What is set before an engine, and PyTorch with it, is imported."""

from __future__ import annotations

import os

import pytest

from headrace.engines.choosing import registry
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_for_others_soon_sleep_unless_the_user_has_said_how_they_wait(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(registry, "create", lambda *_, **__: found.append(os.environ.get("GOMP_SPINCOUNT")))
    load_engine(EngineConfig("embed"))
    assert found == [expected]
