"""What docs/structured.md shows is run, so that it cannot rot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")


def test_the_model_is_asked_again_as_the_page_says(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    [printed] = re.findall(r"^prints\n\n```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    assert found.stdout == printed
