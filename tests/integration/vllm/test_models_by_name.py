"""`--engine vllm` with a model by its name on a hub, which is a stand-in on loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.integration.hub.standin import running_hub
from tests.integration.vllm.conftest import FLAGS
from tests.integration.vllm.test_jobs import PROGRAM, read, write


def test_a_job_downloads_the_commit_of_its_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": number, "text": f"question {number}"} for number in range(6)])
    command = [
        *PROGRAM,
        "run",
        "--task",
        "generate",
        "--engine",
        "vllm",
        "--max-tokens",
        "8",
        *FLAGS,
        "-i",
        str(source),
    ]

    def job(name: str, target: Path) -> tuple[list[dict[str, object]], str]:
        ended = subprocess.run(
            [*command, "--model", name, "-o", str(target)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return read(target), ended.stderr

    expected, _ = job(str(model), tmp_path / "folder.jsonl")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        commit = hub.repository("acme/llama").commit_folder(model)
        found, said = job("acme/llama", tmp_path / "hub.jsonl")
        assert found == expected
        assert f"acme/llama at commit {commit}" in said
        assert hub.asked["model.safetensors"] == 1
