"""How many examples hypothesis tries."""

from __future__ import annotations

import os

FEW = "HEADRACE_TEST_FEW_EXAMPLES"
"""The variable that says that the thorough tests are left out: tests/conftest.py sets it."""


def examples(number: int) -> int:
    """So many, or a third of them where the thorough tests are left out."""
    return number // 3 if FEW in os.environ else number
