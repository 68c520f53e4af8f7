"""Jobs with one bad setting each: a script follows the first advice of their reports, at most three times.

python -m benchmarks.advice            all jobs
python -m benchmarks.advice NAME...    those whose names contain one of these; the other rows of the table are kept
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import headrace
from benchmarks.common import RESULTS, report
from benchmarks.prefixes import LETTERS, model_folder
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.jobs.settings import Limits
from headrace.observe.reporting import summary
from headrace.observe.reporting.job_figures import in_json

COLUMNS = ["job", "records/s", "advice followed", "saves: said / did", "records/s then", "best setting", "of the best"]
STEPS = 3
ENOUGH = 0.9
_SAME = "the same setting"
"""The advice has led to the best setting itself."""


class Paced:
    """An engine whose device takes as long as it is told, so that the figures are those of the settings.

    Args:
        fixed_ms: of each batch.
        token_us: of each computed token, padding included.
        prepare_ms: of each record, spent waiting, such as for another service.
        room: computed tokens that fit into its memory.
        dimension: of the vectors that it returns.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        fixed_ms: float = 2.0,
        token_us: float = 20.0,
        prepare_ms: float = 0.0,
        room: int = 1_000_000,
        dimension: int = 1,
    ) -> None:
        rows = 32 if prepare_ms else None
        self.profile = EngineProfile(batching="batches", pads=True, batch_cost=4_096, batch_size=256, prepare_rows=rows)
        self._model = model
        self._fixed_s, self._token_s, self._prepare_s = fixed_ms / 1e3, token_us / 1e6, prepare_ms / 1e3
        self._room, self._dimension = room, dimension

    def describe(self) -> dict[str, object]:
        """What determines the outputs."""
        return {"engine": "paced", "model": self._model, "dimension": self._dimension}

    def prepare(self, texts: Sequence[str]) -> list[Prepared[str] | Exception]:
        """Counts words."""
        if self._prepare_s:
            time.sleep(self._prepare_s * len(texts))
        return [Prepared(text, len(text.split())) for text in texts]

    def forward(self, batch: list[str]) -> list[list[float]]:
        """One vector for each text."""
        tokens = len(batch) * max(len(text.split()) for text in batch)
        time.sleep(self._fixed_s + self._token_s * tokens)
        if tokens > self._room:
            raise MemoryError(f"{tokens} tokens do not fit")
        return [[len(text) / 7 + place / 3 for place in range(self._dimension)] for text in batch]

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class Settings:
    """What the advice may change of a job."""

    records: int = 6_000
    suffix: str = ".parquet"
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `headrace.run`."""
    words: tuple[int, int] = (1, 60)
    copies: int = 1
    """How often each text occurs."""
    documents: int = 0
    """Of a language model's job: documents, each with many questions, in a table without order."""

    def with_options(self, **options: object) -> Settings:
        """The same with other options of `headrace.run`."""
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Case:
    """A job with a bad setting, and the same with the best one."""

    name: str
    bad: Settings
    best: Settings


def paced(**engine_options: object) -> dict[str, Any]:
    """A job of the engine above."""
    return {"task": "custom", "engine": "benchmarks.advice:Paced", "engine_options": engine_options}


def questions(model: Path, **options: object) -> Settings:
    """A job of a language model that reads many questions about few documents."""
    generate = {
        "task": "generate", "model": str(model), "dtype": "float32", "max_num_seqs": 16, "max_tokens": 4,
        "kv_cache_tokens": 8_192, "ignore_eos": True, **options,
    }  # fmt: skip
    return Settings(96, options=generate, documents=8)


def cases(model: Path) -> list[Case]:
    """All of them; `model` is the folder of a language model."""
    slow_prepare = Settings(1_500, options=paced(prepare_ms=4, token_us=30))
    small = Settings(6_000, options=paced(fixed_ms=10, token_us=10))
    memory = Settings(2_000, options=paced(token_us=30, room=6_000)).with_options(batch_size=1_000)
    padded = Settings(800, options=paced(), words=(1, 500))
    lines = Settings(24_000, options=paced(token_us=3, dimension=384))
    held = Settings(4_000, options=paced())
    equal = Settings(6_000, options=paced(), copies=20)
    embed = Settings(400, options={"task": "embed", "dtype": "float32"})
    return [
        Case(
            "one worker prepares (--workers 1)",
            replace(slow_prepare, limits=Limits(workers=1)),
            replace(slow_prepare, limits=Limits(workers=6)),
        ),
        Case("batches of 16 (--batch-size 16)", small.with_options(batch_size=16), small.with_options(batch_size=512)),
        Case(
            "batches that do not fit (--batch-tokens 40,000)",
            memory.with_options(batch_tokens=40_000),
            memory.with_options(batch_tokens=6_000),
        ),
        Case(
            "records of all lengths together (--batch-tokens 1,000,000)",
            padded.with_options(batch_tokens=1_000_000, batch_size=2_000),
            padded.with_options(batch_tokens=8_000),
        ),
        Case("vectors as text (-o vectors.jsonl)", replace(lines, suffix=".jsonl"), lines),
        Case(
            "little room for records (--buffer-memory 50 kB)",
            replace(held, limits=Limits(buffer_memory=50_000)),
            held,
        ),
        Case("equal records computed again (--no-dedupe)", equal, equal.with_options(dedupe=True)),
        Case(
            "MiniLM, one record at a time (--batch-size 1)",
            embed.with_options(batch_size=1),
            embed.with_options(batch_tokens=4_096),
        ),
        Case(
            "MiniLM in float16 (--dtype float16)",
            replace(embed, records=120).with_options(dtype="float16"),
            replace(embed, records=120),
        ),
        Case(
            "Llama, two answers at a time (--max-num-seqs 2)",
            questions(model, prompt_template="{question}", max_tokens=24, max_num_seqs=2),
            questions(model, prompt_template="{question}", max_tokens=24, max_num_seqs=16),
        ),
        Case(
            "Llama, fields in a bad order (--prompt-template)",
            questions(model, prompt_template="{number} {question} {document}="),
            questions(model, prompt_template="{document} {question} {number}="),
        ),
        Case(
            "Llama, prompts in the order of the input (--order input)",
            questions(model, prompt_template="{document} {question} {number}=", order="input"),
            questions(model, prompt_template="{document} {question} {number}="),
        ),
    ]


def rows(settings: Settings) -> Iterator[dict[str, str]]:
    """The rows of a job, always the same."""
    made = random.Random(7)
    if settings.documents:
        documents = ["".join(made.choices(LETTERS, k=600)) for _ in range(settings.documents)]
        for _ in range(settings.records):
            question, number = "".join(made.choices(LETTERS, k=12)), f"{made.randrange(10**6)}"
            yield {"document": made.choice(documents), "question": question, "number": number}
        return
    least, most = settings.words
    different = [f"{made.random()} " + "word " * made.randint(least, most)
                 for _ in range(settings.records // settings.copies)]  # fmt: skip
    chosen = different * settings.copies
    made.shuffle(chosen)
    yield from ({"text": text} for text in chosen)


def texts(settings: Settings, folder: Path) -> Path:
    """The input of a job."""
    path = folder / f"{settings.records}-{settings.words}-{settings.copies}-{settings.documents}.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(settings)))
    return path


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """The figures of the job's report, as `headrace report --json` prints them."""
    sink = folder / f"out{settings.suffix}"
    headrace.run(
        texts(settings, folder), sink=sink, limits=settings.limits, overwrite=True, progress=False, **settings.options
    )
    return in_json(summary.read(Path(f"{sink}.parts", "report.json")), None)


def followed(settings: Settings, advice: Mapping[str, Any]) -> Settings | None:
    """The settings after this advice; None if no setting was named that a script can change."""
    flag, value = advice["setting"], advice["value"]
    if not value:
        return None
    limits: dict[str, Callable[[], object]] = {
        "--workers": lambda: replace(settings.limits, workers=int(value)),
        "--buffer-memory": lambda: replace(settings.limits, buffer_memory=int(value)),
    }
    if flag in limits:
        return replace(settings, limits=limits[flag]())  # type: ignore[arg-type]
    if flag == "--output-file":
        return replace(settings, suffix=value)
    if flag in ("--dedupe", "--dtype", "--order", "--prompt-template", "--worker-kind"):
        return settings.with_options(**{flag.strip("-").replace("-", "_"): value == "true" or value})
    if flag in ("--batch-size", "--batch-tokens", "--max-num-seqs"):
        return settings.with_options(**{flag.strip("-").replace("-", "_"): int(value)})
    return None


def seconds(found: Mapping[str, Any]) -> float:
    """Of a run, after its start."""
    return float(found["wall_s"] - found["causes"]["starting"])


def measured(case: Case, folder: Path) -> list[Any]:
    """A row of the table."""
    settings, found = case.bad, run(case.bad, folder)
    bad, taken, promises = found["records_per_s"], [], []
    for _ in range(STEPS):
        advice = next(iter(found["advices"]), None)
        changed = followed(settings, advice) if advice is not None else None
        if advice is None or changed is None:
            print(f"  {case.name}: {found['advice']}", file=sys.stderr)
            break
        before = seconds(found)
        print(f"  {case.name}: {advice['text']}", file=sys.stderr)
        settings, found = changed, run(changed, folder)
        taken.append(f"{advice['setting']} {advice['value']}")
        promises.append((advice["gain_s"] / before, (before - seconds(found)) / before))
    best = run(case.best, folder)["records_per_s"]
    if found["records_per_s"] < best:  # perhaps other work on the machine has disturbed one of them
        found = max(found, run(settings, folder), key=lambda one: one["records_per_s"])
        best = max(best, run(case.best, folder)["records_per_s"])
    said = ", ".join(f"{promised:.0%} / {got:.0%}" for promised, got in promises)
    reached = found["records_per_s"]
    share = _SAME if settings == case.best else f"{reached / max(best, reached):.0%}"
    return [case.name, round(bad), "; ".join(taken), said, round(reached), round(best), share]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder, in memory where there is one: the disk is not what is measured."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


def earlier() -> list[list[Any]]:
    """The rows of earlier runs."""
    path = RESULTS / "advice.json"
    return [list(row.values()) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def main() -> None:
    """Run the jobs, one after the other."""
    wanted = sys.argv[1:]
    with workplace() as folder:
        made = model_folder(folder / "llama")
        chosen = [case for case in cases(made) if not wanted or any(word in case.name for word in wanted)]
        table = [measured(case, folder) for case in chosen]
        names = [case.name for case in cases(made)]
    kept = {row[0]: row for row in (earlier() if wanted else [])} | {row[0]: row for row in table}
    table = [kept[name] for name in names if name in kept]
    report(
        "advice",
        "Following the first advice of the report",
        COLUMNS,
        table,
        [f"At most {STEPS} steps each. The first jobs have an engine with simulated device times."],
    )
    if short := [row[0] for row in table if row[-1] != _SAME and int(row[-1].rstrip("%")) < 100 * ENOUGH]:
        sys.exit(f"below {ENOUGH:.0%} of the best setting: {', '.join(short)}")


if __name__ == "__main__":
    main()
