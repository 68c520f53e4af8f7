"""Real questions through the engines that generate: all of them answered, none lost, none twice.

HEADRACE_GSM8K names the file: a JSON object with a "question" on each line, such as the test set of gsm8k (1,319).
The model has random weights: what it says means nothing, that it says something to each does.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from tests.acceptance.command import end, start
from tests.integration.vllm.random_llama import save_random_llama

QUESTIONS = os.environ.get("HEADRACE_GSM8K")
FLAGS = {
    "torch": ("--max-num-seqs", "32", "--max-model-len", "1024"),
    "vllm": ("--max-num-seqs", "32", "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", "--no-chat"),
}


@pytest.mark.skipif(QUESTIONS is None, reason="HEADRACE_GSM8K names no file of questions")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", FLAGS)
def test_every_question_is_answered_once(engine: str, tmp_path: Path) -> None:
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: scripts/test-vllm")
    assert QUESTIONS is not None
    count = len(Path(QUESTIONS).read_text(encoding="utf-8").splitlines())
    model = save_random_llama(tmp_path / "llama")
    command = ("run", "--task", "generate", "--engine", engine, "--model", model, "-i", QUESTIONS, "-o", "out.jsonl")
    process = start(*command, "--prompt-column", "question", "--max-tokens", "8", *FLAGS[engine], folder=tmp_path)
    status, said = end(process, seconds=850)
    assert status == 0
    assert f"wrote out.jsonl: {count:,} of {count:,} records" in said
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == list(range(count))
    assert all(1 <= row["generation"]["completion_tokens"] <= 8 for row in rows)
    assert all(row["generation"]["prompt_tokens"] > 20 for row in rows)
