"""The page of a real job in Chromium: nothing goes wrong, nothing is fetched, every chart is drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.acceptance.command import headrace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
pytest.importorskip("vl_convert", reason="needs headrace[report]")

HOSTILE = "</script><script>document.title='broken'</script>"
CHARTS = ("causes", "over-time", "timeline", "stages", "throughput", "tokens", "size", "cost")


def opened(page: Path, *flags: str) -> tuple[str, str]:
    """The page's elements once its scripts have run, and what the console said."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr",
            "--virtual-time-budget=20000", "--host-resolver-rules=MAP * ~NOTFOUND", *flags, "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=150,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(2_000))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = ("--task", "embed", "--engine", "tests.acceptance.jobs.engines:slow", "--limit", "400")
    for name in ("a.jsonl", "b.jsonl"):
        status, said = headrace("run", "-i", "in.jsonl", "-o", name, *engine, "--model", HOSTILE, folder=folder)
        assert status == 0, said
    return folder


def test_a_page_is_drawn_without_an_error_or_a_request(folder: Path) -> None:
    """Its policy forbids every request: one that was tried would be an error in the console."""
    status, said = headrace("report", "a.jsonl", "--gpu-hour-price", "2", folder=folder)
    assert status == 0, said
    page, console = opened(folder / "a.jsonl.report.html")
    assert console == ""
    assert f'data-drawn="{page.count(chr(60) + "div class=" + chr(34) + "chart")}"' in page
    for name in CHARTS:
        chart = re.search(rf'<div class="chart[^"]*" id="{name}-0".*?<svg.*?</svg>', page, re.DOTALL)
        assert chart is not None, name
        assert chart.group().count("<path") > 3, name
    assert "<title>headrace report: a.jsonl</title>" in page  # the model's name has not become a script
    assert "&lt;/script&gt;&lt;script&gt;document.title='broken'" in page


def test_two_jobs_are_drawn_side_by_side_in_the_dark(folder: Path) -> None:
    status, said = headrace("report", "a.jsonl", "b.jsonl", "-o", "both.html", folder=folder)
    assert status == 0, said
    page, console = opened(folder / "both.html", "--blink-settings=preferredColorScheme=0")
    assert console == ""
    assert all(f'id="{name}-{job}"' in page for name in CHARTS for job in (0, 1))
