#!/usr/bin/env python
"""Measure the included model with `headrace tune`, and put the table and the picture into docs/tuning.md.

.venv/bin/python scripts/tune_picture.py                     about two minutes
.venv/bin/python scripts/tune_picture.py --docs FOLDER       into another folder, which holds a tuning.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from report_picture import program  # noqa: E402 - beside this script

from examples.docstrings import collect  # noqa: E402 - found by the path above

BLOCK = re.compile(r"(<!-- scripts/tune_picture.py -->\n```\n).*?(\n```)", re.DOTALL)


def main() -> None:
    """Measure, then write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("flags", nargs="*", help="of headrace tune, after --")
    given = parser.parse_args()
    page, picture = given.docs / "tuning.md", given.docs / "images" / "tune.svg"
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "docs.jsonl"
        found = list(collect().values())
        chosen = found[:: max(len(found) // given.records, 1)][: given.records]
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
        command = ["tune", "--task", "embed", "-i", str(texts), "--plot", str(picture), *given.flags]
        done = subprocess.run(
            program(*command),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": folder},
        )
    if done.returncode != 0:
        sys.exit(f"headrace tune ended with status {done.returncode}")
    before = page.read_text(encoding="utf-8")
    table = done.stdout.strip()
    after, count = BLOCK.subn(lambda found: found[1] + table + found[2], before)
    if count != 1:
        sys.exit(f"{page} has no place for the table, or more than one: <!-- scripts/tune_picture.py -->")
    page.write_text(after, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
