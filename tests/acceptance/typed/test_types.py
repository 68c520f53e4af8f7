"""What a user's type checker says of calls to Headrace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "src"
SCRIPTS = ("correct.py", "mistaken.py")
# Without the types of libraries: reading all of PyTorch takes a minute. Pyright reads what it needs of them.
MYPY = "[mypy]\nstrict = True\nfollow_imports = skip\n[mypy-headrace.*]\nfollow_imports = silent\n"
CHECKERS = {
    "mypy": ("-m", "mypy", "--config-file=mypy.ini"),
    "pyright": ("-m", "pyright", "--pythonpath", sys.executable),
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_every_mistake_is_found_and_nothing_else(checker: str, tmp_path: Path) -> None:
    for script in SCRIPTS:
        (tmp_path / script).write_text((HERE / script).read_text())
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = os.environ | {
        "MYPYPATH": str(SOURCES),
        "PYTHONPATH": str(SOURCES),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, *CHECKERS[checker], *SCRIPTS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = {
        (script, int(line)) for script, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", ended.stdout)
    }
    lines = (HERE / "mistaken.py").read_text().splitlines()
    mistakes = {("mistaken.py", number) for number, line in enumerate(lines, 1) if "# mistake" in line}
    assert len(mistakes) == 6
    assert found == mistakes, ended.stdout
