"""A generation job whose answers are right or wrong: sums that the arithmetic model has never seen.

python examples/sums.py
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import headrace

UNSEEN = Path(__file__).parent / "unseen_sums.jsonl"


def main() -> None:
    """Answer every held-out sum, in digits and in words, and print the share of exact answers."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        headrace.run(UNSEEN, sink=answers, task="generate", text_column="prompt", max_tokens=16, progress=False)
        given = [json.loads(line)["generation"]["text"] for line in answers.read_text().splitlines()]
    rows = [json.loads(line) for line in UNSEEN.read_text().splitlines()]
    asked = Counter(row["kind"] for row in rows)
    right = Counter(row["kind"] for row, text in zip(rows, given, strict=True) if text == row["answer"])
    for kind, count in asked.items():
        print(f"{kind}: {right[kind]} of {count} right, {right[kind] / count:.1%}")


if __name__ == "__main__":
    main()
