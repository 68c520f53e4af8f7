"""The contract of the engines on a CUDA device: scripts/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.engines.fixtures import case, engine

__all__ = ["case", "device", "engine"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here, and skip it where there is no device."""
    import torch

    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(300))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device: scripts/gpu"))


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """CUDA, with convolutions as exact as everything else: the contract compares to five digits."""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield "cuda"
    torch.backends.cudnn.allow_tf32 = before
