"""Bad prompts and bad models from the command line: each is its record's error or one clear line; nothing hangs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import headrace, lines_of

from headrace.engines.generation.causal_lm import ARITHMETIC

GOOD: dict[str, Any] = {
    "sum": "12+34=",
    "chat": [{"role": "user", "content": "What is 20+22?"}],
    "endless": {"prompt": "1+1=", "max_tokens": 100_000, "ignore_eos": True},
}
BAD: dict[str, tuple[Any, str]] = {
    "null": (None, "the prompt is null"),
    "empty": ("", "the prompt is empty"),
    "long": ("9" * 600, "the prompt has 600 tokens, which leaves no room for an answer in a context of 128"),
    "role": ([{"role": "wizard", "content": "hi"}], "message 0 has the role 'wizard'; known: system"),
    "hot": ({"prompt": "1+1=", "temperature": -1}, "temperature is -1: it must be a number between 0 and 100"),
    "none": ({"prompt": "1+1=", "max_tokens": 0}, "max_tokens is 0"),
    "top": ({"prompt": "1+1=", "top_p": 2}, "top_p is 2"),
    "field": ({"prompt": "1+1=", "max_token": 3}, "unknown field 'max_token'; known: prompt"),
}
COMMAND = ("run", "--task", "generate", "-i", "in.jsonl", "-o", "out.jsonl", "--prompt-column", "prompt")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("engine", ["torch", "static"])
def test_every_bad_prompt_fails_alone_and_an_endless_answer_ends(tmp_path: Path, engine: str) -> None:
    rows = [{"id": name, "prompt": value} for name, (value, _) in BAD.items()]
    rows[3:3] = [{"id": name, "prompt": value} for name, value in GOOD.items()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, said = headrace(
        *COMMAND, "--engine", engine, "--max-model-len", "128", "--max-error-rate", "1", folder=tmp_path
    )
    assert (status, "3 of 11 records, 8 failed" in said) == (3, True)
    answers = {row["id"]: row["generation"] for row in lines(tmp_path / "out.jsonl")}
    assert (answers["sum"]["text"], answers["chat"]["text"]) == ("46", "20+22=42")
    assert answers["endless"]["finish_reason"] == "length"
    assert answers["endless"]["completion_tokens"] == 128 - len("1+1=")
    letters = {row["id"]: row["message"] for row in lines(tmp_path / "out.errors.jsonl")}
    assert letters.keys() == BAD.keys()
    for name, (_, reason) in BAD.items():
        assert letters[name].startswith(reason)


@pytest.mark.parametrize(
    ("missing", "flags", "message"),
    [
        ("tokenizer.json", (), "holds no tokenizer.json"),
        (None, ("--kv-cache-tokens", "10000000000"), "has no room for a cache of 10,000,0"),
        (None, ("--engine", "vllmm"), "has no engine 'vllmm'; known: torch, static, vllm"),
    ],
)
def test_a_model_that_cannot_run_is_one_clear_line(
    tmp_path: Path, missing: str | None, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 0, "prompt": "1+1="}) + "\n")
    shutil.copytree(ARITHMETIC, tmp_path / "model", ignore=shutil.ignore_patterns(missing or ""))
    status, said = headrace(*COMMAND, "--model", "model", *flags, folder=tmp_path)
    assert status == 2
    assert message in said
    assert len(lines_of(said)) == 1
    assert not (tmp_path / "out.jsonl").exists()
