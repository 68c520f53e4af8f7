"""Memory and time of a job that sorts the prompts of its whole input, by their number, with a no-op engine.

python -m benchmarks.prefixes_memory                     # 100,000, 1 million and 3 million prompts
python -m benchmarks.prefixes_memory --prompts 10000000  # so many, of each kind
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from headrace.app.jobs import job as jobs
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.profile import EngineProfile
from headrace.events import Event, OrderChosen
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings, Limits

COUNTS = (100_000, 1_000_000, 3_000_000)
BUFFER = 128_000_000
QUESTIONS = 32
KINDS = {
    "documents": f"{QUESTIONS} questions about each document, shuffled",
    "different": "no two begin alike",
    "equal": "one prompt again and again",
}


class NoOp:
    """An engine with a prefix cache, so to speak, that answers at once."""

    profile = EngineProfile(batching="batches", batch_cost=1 << 20, batch_size=4096, workers_cache_prefixes=True)

    def describe(self) -> dict[str, object]:
        """What determines the answers."""
        return {"engine": "no-op"}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[int] | Exception]:
        """The lengths."""
        return [Prepared(len(str(text)), 1) for text in inputs]

    def forward(self, batch: Sequence[int]) -> list[int]:
        """The lengths again."""
        return list(batch)

    def close(self) -> None:
        """Nothing to free."""


def write_prompts(path: Path, kind: str, count: int) -> None:
    """Prompts of about 300 characters, one a line."""
    dice = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            if kind == "documents":
                document = dice.randrange(count // QUESTIONS)
                text = f"document {document * 7919 % 1_000_003:08d} " + "word " * 50 + f"question {number}"
            else:
                text = f"{number if kind == 'different' else 0:08d} " + "word " * 50
            file.write(f'{{"text": "{text}"}}\n')


def measure(source: Path) -> dict[str, Any]:
    """Run the job in this process."""
    chosen: list[OrderChosen] = []

    def listen(event: Event) -> None:
        if isinstance(event, OrderChosen):
            chosen.append(event)

    sink = source.with_name("out.jsonl")
    settings = JobSettings(
        source,
        sink,
        EngineConfig(task="embed", engine="benchmarks.prefixes_memory:NoOp"),
        limits=Limits(buffer_memory=BUFFER),
        dedupe=False,
    )
    began = time.monotonic()
    end = main_path.run(jobs.build(jobs.check(settings), NoOp(), StopRequest(), listen))
    took = time.monotonic() - began
    with sink.open() as lines:
        assert end.records == sum(1 for _ in lines), "every record has its row"
    orders = [event for event in chosen if event.order == "sorted"]
    return {
        "records": end.records,
        "sorted": sum(event.records for event in orders),
        "sort_s": orders[0].at - chosen[0].at if orders else 0.0,
        "s": took,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """The table: each job in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(measure(given.measure)))
        return
    runs = [(kind, given.prompts) for kind in KINDS] if given.prompts else [("documents", count) for count in COUNTS]
    rows: list[list[Any]] = []
    for kind, count in runs:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "in.jsonl")
            write_prompts(source, kind, count)
            command = [sys.executable, "-m", "benchmarks.prefixes_memory", "--measure", str(source)]
            found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
        rows.append([KINDS[kind], f"{count:,}", f"{found['sorted']:,}", found["sort_s"], found["s"], found["mib"]])
        print(*rows[-1], file=sys.stderr, flush=True)
    report(
        None if given.prompts else "prefixes-memory",
        "Prompts in the order of the whole input, with a no-op engine",
        ["prompts", "number", "sorted on disk", "s until these are sorted", "s of the job", "peak MiB"],
        rows,
        [
            (
                f"About 300 characters each, in JSON Lines; --buffer-memory {BUFFER // 1_000_000}MB. The engine works "
                "on the first window while the others are sorted."
            )
        ],
    )


if __name__ == "__main__":
    main()
