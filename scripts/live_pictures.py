#!/usr/bin/env python
"""Draw the pictures of docs/live.md: `headrace top` on a real job, and the dashboard of a real server under load.

.venv/bin/python scripts/live_pictures.py    writes docs/images/top.png and docs/images/dashboard.png
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from report_picture import IMAGES, OWN, program, write_texts  # noqa: E402 - beside this script
from rich.console import Console  # noqa: E402
from tests.acceptance.browser import Browser  # noqa: E402
from tests.acceptance.serving.process import server  # noqa: E402

from headrace.cli.top import job_frame  # noqa: E402
from headrace.observe.live.frame import wall_clock  # noqa: E402
from headrace.observe.live.top import render_frame  # noqa: E402

MINE = ("--task", "custom", "--engine", "mine:Engine")


def top(folder: Path) -> None:
    """A frame of a running job, as a terminal of 110 columns shows it."""
    arguments = ["run", "-i", "docs.jsonl", "-o", "vectors.parquet", *MINE, "--workers", "2"]
    output = folder / "vectors.parquet"
    with subprocess.Popen(program(*arguments), cwd=folder, stderr=subprocess.DEVNULL) as job:
        while not (folder / "vectors.parquet.parts" / "live.json").exists():
            time.sleep(0.5)
        while (frame := job_frame(str(output))).counts["records"] < 3_500:
            time.sleep(0.5)
        job.kill()
    console = Console(record=True, width=110, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print(render_frame(frame, wall_clock()))
    (folder / "top.svg").write_text(console.export_svg(title="headrace top vectors.parquet"), encoding="utf-8")
    with Browser(folder / "profile-top") as browser:
        browser.open((folder / "top.svg").as_uri())
        width = browser.until("document.documentElement.viewBox?.baseVal.width")
        height = browser.evaluate("document.documentElement.viewBox.baseVal.height")
        browser.picture(IMAGES / "top.png", 1060, round(1060 * height / width))


async def load(url: str, seconds: float) -> None:
    """Some clients, with texts of different lengths."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(number: int) -> None:
            while time.monotonic() < end:
                texts = ["word " * random.randint(1, 160) for _ in range(4)] if random.random() > 0.02 else [""]
                await client.post("/generate", json={"prompts": texts})
                await asyncio.sleep(random.random() * 0.4 * (1 + number % 3))

        await asyncio.gather(*map(one, range(24)))


def dashboard(folder: Path) -> None:
    """The dashboard after half a minute."""
    with server(*MINE, "--served-model-name", "paced", folder=folder) as (_, url):
        clients = threading.Thread(target=lambda: asyncio.run(load(url, 38)))
        clients.start()
        with Browser(folder / "profile-dashboard") as browser:
            browser.open(f"{url}/dashboard")
            browser.until("Number(document.body?.dataset.frames || 0)", lambda frames: frames >= 30)
            browser.picture(IMAGES / "dashboard.png", 1180, 1325)
        clients.join()


def main() -> None:
    """Draw both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "docs.jsonl", 12_000)
        (folder / "mine.py").write_text(OWN)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(folder), str(ROOT)])
        os.chdir(folder)
        top(folder)
        dashboard(folder)


if __name__ == "__main__":
    main()
