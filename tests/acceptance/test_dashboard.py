"""The dashboard of a real server in Chromium: the key is asked for, figures move, nothing is fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.acceptance.browser import CHROMIUM, Browser
from tests.acceptance.serving.process import server

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

HOSTILE = "</script><img src=x onerror=document.title='broken'>"
FRAMES = "Number(document.body?.dataset.frames || 0)"


def test_a_browser_shows_the_server_once_it_has_the_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("boss secret-2 admin\n")
    arguments = (
        "--task",
        "embed",
        "--engine",
        "headrace.testing:FakeEngine",
        "--api-key-file",
        "keys",
        "--served-model-name",
        HOSTILE,
    )
    with server(*arguments, folder=tmp_path) as (_, url), Browser(tmp_path / "profile") as browser:
        key = {"Authorization": "Bearer secret-2"}
        httpx.post(f"{url}/v1/embeddings", json={"input": []}, headers=key, timeout=60)
        browser.open(f"{url}/dashboard")
        browser.until("document.getElementById('asked')?.hidden === false")
        enter = "document.getElementById('key').value = '{}'; document.getElementById('form').requestSubmit()"
        browser.evaluate(enter.format("wrong"))
        assert "unknown" in browser.until("document.getElementById('refused').textContent")
        browser.evaluate(enter.format("käse"))
        assert "ASCII" in browser.evaluate("document.getElementById('refused').textContent")
        browser.console.clear()  # Chromium notes each answer of 401
        browser.evaluate(enter.format("secret-2"))
        browser.until(FRAMES, lambda frames: frames >= 3)
        assert browser.evaluate("document.getElementById('name').textContent") == HOSTILE
        assert browser.evaluate("document.title") == f"{HOSTILE} - headrace"
        assert "400 on /v1/embeddings" in browser.evaluate("document.getElementById('errors').innerText")
        assert "no requests" in browser.evaluate("document.getElementById('causes').innerText")
        assert browser.evaluate("document.querySelectorAll('#history > div').length") >= 3
        assert "secret" not in browser.evaluate("location.href + document.documentElement.outerHTML + document.cookie")
        browser.open(f"{url}/dashboard")  # the key is kept as long as the tab
        browser.until(FRAMES)
        assert browser.console == []
        origins = "performance.getEntriesByType('resource').every(one => new URL(one.name).origin === location.origin)"
        assert browser.evaluate(origins)


def test_the_page_says_so_when_the_server_has_gone(tmp_path: Path) -> None:
    with (
        Browser(tmp_path / "profile", dark=True) as browser,
        server("--task", "embed", "--engine", "headrace.testing:FakeEngine", folder=tmp_path) as (process, url),
    ):
        browser.open(f"{url}/dashboard")
        browser.until(FRAMES)
        process.terminate()
        browser.until("document.getElementById('state').textContent", lambda text: "no connection" in text)
        assert process.wait(60) == 0
