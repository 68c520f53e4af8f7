#!/usr/bin/env python
"""Draw the pictures of docs/report.md and docs/bench.md: the pages of real runs in headless Chromium.

.venv/bin/python scripts/report_picture.py          writes docs/images/report.png, report-compared.png and bench.png
.venv/bin/python scripts/report_picture.py bench    writes bench.png alone; an idle machine takes three minutes

The engine of the jobs is paced, so that their pictures look alike on any machine. The first job prepares its records
one chunk at a time; the second follows the advice. The comparison runs the default model on this machine's libraries.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.acceptance.browser import Browser  # noqa: E402 - found by the path above

IMAGES = ROOT / "docs" / "images"
OWN = """
import time
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile

class Engine:
    profile = EngineProfile(batching="batches", pads=True, batch_cost=2_000, batch_size=32)
    def __init__(self, model=None): self.model = model
    def describe(self): return {"engine": "paced"}
    def close(self): pass
    def prepare(self, texts):
        time.sleep(0.003 * len(texts))  # such as a look-up in another service
        return [Prepared(text, len(text.split())) if text else ValueError("the text is empty") for text in texts]
    def forward(self, batch):
        time.sleep(0.02 + 0.000_02 * len(batch) * max(len(text.split()) for text in batch))
        return [len(text) for text in batch]
"""


def program(*arguments: str) -> list[str]:
    """A command of this checkout."""
    return [sys.executable, "-c", "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()",
            *arguments]  # fmt: skip


def headrace(folder: Path, *arguments: str) -> None:
    """Run one command."""
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    done = subprocess.run(program(*arguments), cwd=folder, check=False, env=os.environ | {"PYTHONPATH": path})
    if done.returncode not in (0, 3):  # 3: some records failed, which belongs to the picture
        sys.exit(f"headrace {' '.join(arguments)} ended with status {done.returncode}")


def write_texts(path: Path, count: int) -> None:
    """An input of texts that differ; a few are empty, which the engine refuses."""
    random.seed(1)
    texts = (f"{number} " + "word " * random.randint(4, 59) if number % 97 else "" for number in range(count))
    rows = ({"id": number, "text": text} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def picture(page: Path, image: Path, width: int, height: int, *, dark: bool) -> None:
    """What Chromium shows of a page."""
    with Browser(page.parent / f"profile-{image.stem}", dark=dark) as browser:
        browser.open(page.as_uri())
        browser.until("document.body?.dataset.drawn")
        browser.picture(image, width, height)
    print(f"wrote {image}")


def jobs(folder: Path) -> None:
    """Two jobs, and their reports."""
    write_texts(folder / "docs.jsonl", 6_000)
    (folder / "mine.py").write_text(OWN)
    common = ("run", "-i", "docs.jsonl", "--task", "custom", "--engine", "mine:Engine")
    headrace(folder, *common, "-o", "before.parquet", "--workers", "1")
    headrace(folder, *common, "-o", "after.parquet", "--workers", "4")
    headrace(folder, "report", "before.parquet", "--gpu-hour-price", "2.50")
    headrace(folder, "report", "before.parquet", "after.parquet", "-o", "compared.html")
    picture(folder / "before.parquet.report.html", IMAGES / "report.png", 1180, 2635, dark=False)
    picture(folder / "compared.html", IMAGES / "report-compared.png", 1180, 1250, dark=True)


def bench(folder: Path) -> None:
    """A comparison of what is installed."""
    write_texts(folder / "texts.jsonl", 1_000)
    headrace(folder, "bench", "-i", "texts.jsonl", "--batch-sizes", "8,32", "--rounds", "3")
    picture(folder / "bench.html", IMAGES / "bench.png", 1180, 690, dark=False)


def main() -> None:
    """Draw all pictures, or those that are named."""
    wanted = sys.argv[1:] or ["jobs", "bench"]
    with tempfile.TemporaryDirectory() as name:
        for draw in (jobs, bench):
            if draw.__name__ in wanted:
                draw(Path(name))


if __name__ == "__main__":
    main()
