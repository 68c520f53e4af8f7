"""The fixtures of the contract suite; it also gives time to vLLM, whose core process takes long to start."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.engines.fixtures import case, device, engine

__all__ = ["case", "device", "engine"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the limit where a model server starts."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "[vllm" in item.name:
            item.add_marker(pytest.mark.timeout(300))
