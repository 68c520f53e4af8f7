"""How a test names its parameters."""

from __future__ import annotations

import re


def shown(value: object) -> str:
    """`str(value)` without addresses in memory, which differ between the processes that share the tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
