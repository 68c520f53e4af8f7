"""The commands of docs/protocols.md for those who move over from other servers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.serving.running import running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

SECTION = (Path(__file__).resolve().parents[3] / "docs" / "protocols.md").read_text().split("## Moving over\n")[1]
COMMANDS = dict(re.findall(r"^([A-Z][\w ]+)[,.:][^\n]*\n\n```\n(.*?)```$", SECTION, re.DOTALL | re.MULTILINE))
ENGINES = {"generate": "tests.integration.serving.engines:Talker", "embed": "headrace.testing:FakeEngine"}


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    settings = {task: ServerSettings(EngineConfig(task, engine=name), name="m") for task, name in ENGINES.items()}
    with running(settings["generate"]) as talker, running(settings["embed"]) as embedder:
        yield {"generate": talker.url, "embed": embedder.url}


@pytest.mark.parametrize(
    ("name", "task", "found"),
    [
        ("OpenAI", "generate", lambda answer: answer["choices"][0]["message"]["content"] == "Which water?"),
        ("Anthropic", "generate", lambda answer: answer["content"][0]["text"] == "Which water?"),
        ("Text Embeddings Inference", "embed", lambda answer: len(answer) == 2),
        ("Triton", "embed", lambda answer: answer["outputs"][0]["shape"] == [2, 8]),
        ("TorchServe", "embed", lambda answer: len(answer) == 8),
    ],
)
def test_a_request_as_before_is_answered(addresses: dict[str, str], name: str, task: str, found: Any) -> None:
    command = COMMANDS[name].replace("localhost:8000", addresses[task].removeprefix("http://"))
    ended = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert found(json.loads(ended.stdout)), ended.stdout


def test_the_flags_of_the_commands_are_there() -> None:
    options = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text()
    commands = [shlex.split(one) for one in re.findall(r"`(headrace serve [^`]*)`", SECTION)]
    assert len(commands) == 5
    for flag in {word for command in commands for word in command if word.startswith("--")}:
        assert f"`{flag}`" in options, flag
