"""What docs/cluster.md shows is run, so that it cannot rot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```python\n(.*?)^```\n\nprints\n\n```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_examples_print_what_the_page_says(number: int) -> None:
    code, printed = SHOWN[number]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == printed


def test_the_links_lead_somewhere() -> None:
    assert len(SHOWN) == PAGE.count("\nprints\n")
    links = re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
