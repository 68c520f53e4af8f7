"""Generation jobs whose answers are right or wrong: sums that the arithmetic model has never seen.

python examples/sums.py        # all 814 pairs
python examples/sums.py 100    # the first hundred lines
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

UNSEEN = Path(__file__).parent / "unseen_sums.jsonl"


def answers(source: Path, *flags: str) -> list[str]:
    """What `headrace run --task generate` answers to each prompt of a file."""
    with tempfile.TemporaryDirectory() as folder:
        sink = Path(folder) / "answers.jsonl"
        arguments = ["run", "--task", "generate", "-i", source.name, "-o", str(sink)]
        arguments += ["--prompt-column", "prompt", "--max-tokens", "16", *flags]
        print("$ headrace", shlex.join(["answers.jsonl" if part == str(sink) else part for part in arguments]))
        command = [sys.executable, "-m", "headrace.cli.main", *arguments]
        ended = subprocess.run(command, cwd=source.parent, check=False, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stderr)
        return [json.loads(line)["generation"]["text"] for line in sink.read_text().splitlines()]


def count(rows: list[dict[str, str]], given: list[str]) -> None:
    """Print the share of exact answers of each kind."""
    asked = Counter(row["kind"] for row in rows)
    right = Counter(row["kind"] for row, text in zip(rows, given, strict=True) if text == row["answer"])
    for kind, number in asked.items():
        print(f"{kind}: {right[kind]} of {number} right, {right[kind] / number:.1%}")


def main() -> None:
    """Answer every held-out sum: in digits and in words, to go on from, and then as a user's question of a chat."""
    limit = sys.argv[1:2]
    rows = [json.loads(line) for line in UNSEEN.read_text().splitlines()][: int(limit[0]) if limit else None]
    count(rows, answers(UNSEEN, *(["--limit", *limit] if limit else [])))
    questions = [
        {"kind": "asked", "prompt": f"What is {row['prompt'][:-1]}?", "answer": row["prompt"] + row["answer"]}
        for row in rows
        if row["kind"] == "digits"
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "questions.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in questions))
        count(questions, answers(source, "--chat"))


if __name__ == "__main__":
    main()
