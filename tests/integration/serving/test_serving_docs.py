"""The curl commands of docs/serving.md about scores and images are run, so that they cannot rot."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import running
from tests.small_models import text_model

from examples.digits import main as write_digits
from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")


def commands(section: str) -> list[str]:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [block for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "curl" in block]


def answers(section: str, url: str, folder: Path) -> list[Any]:
    said = [block.replace("localhost:8000", url.removeprefix("http://")) for block in commands(section)]
    ended = [subprocess.run(["bash", "-c", one], cwd=folder, capture_output=True, check=True) for one in said]
    return [json.loads(one.stdout) for one in ended]


def test_scores_and_rankings(tmp_path: Path) -> None:
    model = text_model(tmp_path, ("relevance",))
    with running(ServerSettings(EngineConfig("score", str(model)))) as server:
        scored, ranked = answers("Scores and rankings", server.url, tmp_path)
    assert [one["index"] for one in scored["data"]] == [0, 1]
    assert len(ranked["results"]) == 1
    best = max(scored["data"], key=lambda one: one["score"])
    assert ranked["results"][0]["relevance_score"] == pytest.approx(best["score"], abs=1e-5)


def test_images(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    with running(ServerSettings(EngineConfig("image-classify", "digits"))) as server:
        [answer] = answers("Images", server.url, tmp_path)
    assert answer["data"][0]["label"] == "0"
