from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.virtual_time import virtual as virtual

from headrace.batching.dispatch import offload


@pytest.fixture(scope="module", autouse=True)
def steady_clock() -> Iterator[None]:
    """A machine that pauses blocks no loop: the watcher of blocked loops, who reads real time, sees none pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "monotonic", lambda: 0.0)
        yield
