"""`headrace bench`: Headrace beside other libraries, on the user's own machine, model and texts."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Literal

from headrace.app.bench import BenchResult, BenchRow, BenchSettings, compare, contenders_for, read_texts
from headrace.argument_types import comma_separated
from headrace.cli.flags import positive_numbers, with_settings
from headrace.cli.outcome import aligned, say
from headrace.cli.report import check_file, check_target
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import resolve
from headrace.engines.model_folder import find_folder
from headrace.errors import ConfigError, StoppedEarly, nearest
from headrace.observe.page.bench import render_comparison
from headrace.options import option

_DEFAULT_MODEL = "all-MiniLM-L6-v2, which is included"
EXAMPLES = """Examples:

headrace bench -i docs.jsonl

headrace bench --task classify --model ./sentiment -i reviews.csv --text-column review --limit 500

headrace bench --task generate --model ./qwen -i prompts.jsonl --batch-sizes 1,8,32 --max-tokens 64 -o bench.html
"""


@dataclass(frozen=True, slots=True)
class WhatFlags:
    """The model and the texts."""

    panel: ClassVar[str] = "What is run"

    source: str = option(MISSING, "The texts, as for headrace run.", flags=("-i", "--input-file"))
    task: Literal["embed", "classify", "generate"] = option("embed", "Task of the model.")
    model: str | None = option(None, "Model, as for headrace run. Default: all-MiniLM-L6-v2; the other tasks need one.")
    text_column: str = option("text", "Column with the text.")
    limit: int = option(1_000, "Texts that are used, from the beginning of the input.", minimum=1)
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "Data type of every contender's model.")
    device: str = option("auto", "Device: auto (a GPU if there is one), cpu, cuda or cuda:N.")
    max_tokens: int | None = option(None, "With generate: tokens that each text may get. Default: 32.", minimum=1)


@dataclass(frozen=True, slots=True)
class HowFlags:
    """What is compared, and how long."""

    panel: ClassVar[str] = "Measuring"

    contenders: str | None = option(None, "Such as headrace,vllm. Default: all that are installed: see docs/bench.md.")
    batch_sizes: str = option("8,32,128", "Batch sizes to try beside each contender's default; the fastest is kept.")
    rounds: int = option(3, "How often everything is measured, in turn.", minimum=1)
    timeout: float = option(600.0, "Seconds allowed for a contender in one round, its loading included.", minimum=1)
    output_file: Path = option(Path("bench.html"), "The page.", flags=("-o", "--output-file"))
    json_file: Path | None = option(None, "File for the figures as JSON. Default: beside the page.", flags=("--json",))


@with_settings
def bench(what: WhatFlags, how: HowFlags) -> int:
    """Compare Headrace with what else is installed, on your machine, model and texts.

    Each contender runs in its own process, at its default and at its best batch size.

    Prints a table; writes one HTML page and the figures as JSON. docs/bench.md explains both.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    page, figures = how.output_file, how.json_file or how.output_file.with_suffix(".json")
    check_file(page)
    check_target(figures)
    if figures == page:
        raise ConfigError(f"the page and the figures cannot both be {page}: name the page with -o, such as bench.html")
    if what.max_tokens is not None and what.task != "generate":
        raise ConfigError(f"--max-tokens is for --task generate, not {what.task}; leave it out")
    settings = BenchSettings(
        what.task,
        _folder(what),
        what.model or _DEFAULT_MODEL,
        read_texts(what.source, what.text_column, what.limit),
        _contenders(what.task, how.contenders),
        positive_numbers("batch_sizes", how.batch_sizes),
        how.rounds,
        how.timeout,
        what.dtype,
        what.device,
        what.max_tokens or 32,
    )
    found = compare(settings, say)
    for line in as_lines(found):
        print(line)
    try:
        figures.write_text(found.as_json() + "\n", encoding="utf-8")
        page.write_text(render_comparison(json.loads(found.as_json())), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename}: {error.strerror}; name another file with -o or --json"
        ) from error
    say(f"wrote {page} and {figures}")
    return 0 if any(row.records_per_s for row in found.rows) else 1


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's shape
    signal.signal(number, signal.SIG_IGN)
    os.write(2, b"\nheadrace: interrupted\n")
    raise StoppedEarly(128 + number)


def _folder(what: WhatFlags) -> str:
    if what.model is None and what.task != "embed":
        raise ConfigError(f"--task {what.task} needs --model: a folder, or a model of the Hugging Face Hub")
    config = EngineConfig(what.task, what.model).resolved()
    config.check()
    config = resolve(config)
    return str(find_folder(config.model).resolve())


def _contenders(task: str, wanted: str | None) -> list[str]:
    installed = contenders_for(task)
    names = comma_separated(wanted or "")
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"--contenders: {name!r} is not installed or does not take the task {task}; "
                f"there are {', '.join(installed)}{nearest(name, installed)}"
            )
    return list(names) or installed


def as_lines(found: BenchResult) -> list[str]:
    """The table, and the machine."""
    head = ("contender", "setting", "records/s", "headrace is x", "agrees", "")
    table = [head, *(_cells(row, found.reference) for row in found.rows)]
    there = ", ".join(f"{name} {value}" for name, value in found.machine.items())
    return [*aligned(table, len(head)), "", there]


def _cells(row: BenchRow, reference: str) -> tuple[str, ...]:
    agrees = "reference" if row.contender == reference else "" if row.agreement is None else f"{row.agreement:.4f}"
    return (
        row.contender,
        row.setting,
        "failed" if row.records_per_s is None else f"{row.records_per_s:,.1f}",
        "" if row.headrace_is is None else f"{row.headrace_is:.2f}",
        agrees,
        "; ".join(part for part in ("different answers" if row.differs else "", row.error) if part),
    )
