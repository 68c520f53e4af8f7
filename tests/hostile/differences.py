"""What differs between two outcomes, to be read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

SHOWN = 12
"""Lines of a difference that are shown."""


def shown(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The parts of an outcome that differ. Figures count only where both have them."""
    lines: list[str] = []
    for part in dict.fromkeys([*before, *now]):
        old, new = before.get(part, "(nothing)"), now.get(part, "(nothing)")
        if old == new or (part.startswith("figure ") and not (part in before and part in now)):
            continue
        found = difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "now", n=0, lineterm="")
        cut = [f"      {line[:300]}" for line in found][2:]
        lines += [f"   {part}:", *(cut[:SHOWN] or ["      only in the ends of lines"])]
        lines += [f"      ... and {len(cut) - SHOWN} more"] if len(cut) > SHOWN else []
    return "\n".join(lines)
