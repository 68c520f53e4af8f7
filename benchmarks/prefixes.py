"""Many questions about each of many documents, on a CPU: what it gains to read each document once.

python -m benchmarks.prefixes                           # about ten minutes on an idle core
python -m benchmarks.prefixes peer fields               # only these tables; the others are documents and different
python -m benchmarks.prefixes --small                   # a quarter of the documents, a quarter of the questions
python -m benchmarks.prefixes --gsm8k questions.jsonl   # real questions, each after 8 worked ones
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.common import ratio, report, rounds, version
from headrace import ContinuousBatcher
from headrace.app.jobs import job as jobs
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.planning.survey import survey_prompts
from headrace.jobs.settings import JobSettings, Order

LETTERS = "abcdefghij +=0123456789"  # each is a token of the model
DOCUMENT, ANSWER = 512, 16
SLOTS = 64
ALONE = 32
EXAMPLES = 8
JOB_IN_INPUT_ORDER = "headrace run --order input, pages shared"
JOB = "headrace run, pages shared"
FIELDS = "{question} {number} {document} {source} {lang}="
Tokens = tuple[int, ...]
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Size:
    """How much work a run does."""

    documents: int
    questions: int
    cache: int
    """Tokens of the key-value cache, fewer than those of all documents."""
    rounds: int


FULL = Size(documents=64, questions=32, cache=8_192, rounds=1)
WITH_PEER = Size(documents=32, questions=4, cache=8_192, rounds=1)
SMALL = Size(documents=16, questions=8, cache=4_096, rounds=1)
ALL_DIFFERENT = Size(documents=64, questions=1, cache=8_192, rounds=5)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave."""

    answers: list[str]
    """In the order of the prompts as they were given."""
    computed: int
    """Prompt tokens that went through the model."""


def model_folder(folder: Path, positions: int = 1_024) -> Path:
    """A Llama of 4 million random weights, whose logits are so far apart that rounding decides nothing."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(ARITHMETIC)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def prompts(size: Size) -> list[str]:
    """The questions of each document, document after document: 512 letters, then a question of 8 to 24."""
    rng = random.Random(0)
    asked: list[str] = []
    for _ in range(size.documents):
        document = "".join(rng.choices(LETTERS, k=DOCUMENT - 1))  # with the token that begins every prompt: 512
        asked += [document + "".join(rng.choices(LETTERS, k=rng.randint(8, 24))) for _ in range(size.questions)]
    return asked


def least(tokens: Sequence[Tokens], page: int = 32) -> int:
    """The fewest prompt tokens that must be computed, if each page that prompts share is computed once."""
    known: set[Tokens] = set()
    total = 0
    for ids in tokens:
        full = [ids[:end] for end in range(page, len(ids), page)]
        total += len(ids) - page * sum(one in known for one in full)
        known.update(full)
    return total


def ours(engine: GenerationEngine, asks: Sequence[Any]) -> Outcome:
    """Headrace's engine, new and with an empty cache, and its batcher, with the prompts in the order given."""

    async def run() -> list[str]:
        async with ContinuousBatcher(engine, max_slots=SLOTS, max_cost=engine.profile.max_cost) as batcher:
            return [answer["text"] async for answer in batcher.map(asks)]

    answers = asyncio.run(run())
    return Outcome(answers, engine.prefix_cache_stats().computed)


def job(folder: Path, rows: Sequence[Row], order: Order, options: dict[str, Any], template: str = "{text}") -> Outcome:
    """A bulk job over the rows, from reading them to the output file, with a new engine."""
    with tempfile.TemporaryDirectory() as place:
        sink = Path(place, "out.jsonl")
        config = EngineConfig(task="generate", model=str(folder))
        plan = jobs.check(JobSettings(rows, sink, config, order=order, prompt_template=template))
        engine = GenerationEngine(Generation(model=folder, **options))
        main_path.run(jobs.build(plan, engine, StopRequest(), lambda _: None))
        stats = engine.prefix_cache_stats()
        assert stats is not None, "this model's pages can be shared"
        engine.close()
        return Outcome([json.loads(line)["generation"]["text"] for line in sink.open()], stats.computed)


def peer(model: Any, words: Any, tokens: Sequence[Tokens], cache: int, share: bool) -> Outcome:
    """transformers' `generate_batch` of the whole list, with the same room; sharing, it sorts the list itself."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=cache // 32 + SLOTS + 1,
        max_batch_tokens=512,
        max_requests_per_batch=SLOTS,
        allow_block_sharing=share,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=ANSWER)
    counted = 0
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += kwargs["input_ids"].shape[1]
        return forward(*args, **kwargs)

    model.forward = counting
    try:
        outputs = model.generate_batch(
            [list(ids) for ids in tokens], generation_config=greedy, continuous_batching_config=config,
            progress_bar=False,
        )  # fmt: skip
    finally:
        model.forward = forward
    in_order = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    answers = [words.decode(output.generated_tokens, skip_special_tokens=True) for output in in_order]
    return Outcome(answers, counted - len(tokens) * (ANSWER - 1))


def alone(model: Any, words: Any, tokens: Sequence[Tokens]) -> list[str]:
    """`model.generate` of one prompt at a time."""
    config = GenerationConfig(do_sample=False, max_new_tokens=ANSWER, pad_token_id=0)
    answers = []
    for ids in tokens:
        given = torch.tensor([ids])
        with torch.inference_mode():
            made = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
        answers.append(words.decode(made[0, len(ids) :], skip_special_tokens=True))
    return answers


class Timed:
    """Runs variants over the same prompts, and keeps what each gave and took."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size = size
        self.folder = folder
        self.options: dict[str, Any] = {
            "max_num_seqs": SLOTS,
            "kv_cache_tokens": size.cache,
            "max_tokens": ANSWER,
            "ignore_eos": True,
        }
        self.texts = prompts(size)
        random.Random(1).shuffle(self.texts)
        prepared = GenerationEngine(Generation(model=folder, **self.options)).prepare(self.texts)
        self.tokens: list[Tokens] = [item.payload.prompt for item in prepared if not isinstance(item, Exception)]
        self.outcomes: dict[str, Outcome] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def seconds(self, variant: str, run: Callable[[], Outcome]) -> float:
        """Run a variant; its seconds."""
        started, cpu = time.perf_counter(), time.process_time()
        self.outcomes[variant] = run()
        took = time.perf_counter() - started
        self.cpu_s.setdefault(variant, []).append(time.process_time() - cpu)
        print(f"{variant}: {took:.1f} s, {self.cpu_s[variant][-1]:.1f} s of a core", file=sys.stderr, flush=True)
        return took

    def jobs(self) -> dict[str, Callable[[], float]]:
        """The job in input order, and in the order that it chooses."""
        rows = [{"text": text} for text in self.texts]
        orders: dict[str, Order] = {JOB_IN_INPUT_ORDER: "input", JOB: "auto"}
        return {
            name: partial(self.seconds, name, partial(job, self.folder, rows, order, self.options))
            for name, order in orders.items()
        }


def compare(folder: Path, size: Size, name: str | None, *, with_peer: bool) -> None:
    """Measure all variants in turn and print the table."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    words = AutoTokenizer.from_pretrained(folder)
    timed = Timed(folder, size)
    figures = rounds(size.rounds, timed.jobs())
    if with_peer:
        variant = f"{version('transformers')}, generate_batch, blocks shared, sorted"
        run = partial(peer, model, words, timed.tokens, size.cache, True)
        figures |= {variant: [timed.seconds(variant, run)]}
    _table(name, timed, figures, alone(model, words, timed.tokens[:ALONE]))


def _table(name: str | None, timed: Timed, figures: dict[str, list[float]], reference: list[str]) -> None:
    size, outcomes = timed.size, timed.outcomes
    sent, fewest = sum(map(len, timed.tokens)), least(timed.tokens)
    baseline = figures[JOB_IN_INPUT_ORDER]
    rows = [
        [
            variant,
            len(timed.tokens) * ANSWER / statistics.median(times),
            ratio(baseline[: len(times)], times),
            ratio(timed.cpu_s[JOB_IN_INPUT_ORDER][: len(times)], timed.cpu_s[variant]),
            outcomes[variant].computed,
            outcomes[variant].computed / fewest,
            equal(outcomes[variant].answers, reference),
            equal(outcomes[variant].answers, outcomes[JOB_IN_INPUT_ORDER].answers),
        ]
        for variant, times in figures.items()
    ]
    report(
        name,
        f"{size.questions} questions about each of {size.documents} documents on a CPU, shuffled",
        [
            "variant",
            "tokens/s",
            "x input order",
            "by seconds of a core",
            "prompt tokens computed",
            "x the fewest possible",
            "equal to alone",
            "equal to the first",
        ],
        rows,
        [
            (
                f"{size.documents} documents of {DOCUMENT} tokens x {size.questions} questions of 8 to 24, answers of "
                f"{ANSWER}; a cache of {size.cache:,} tokens; {sent:,} prompt tokens sent, at least {fewest:,} to "
                "compute; a Llama of 4 M random weights, float32, one thread, greedy."
            ),
            (
                f"Rounds: {size.rounds}. Equal to alone: share of {len(reference)} answers that are those of "
                "`generate` of one prompt at a time, letter by letter; equal to the first: of all answers."
            ),
        ],
    )


def equal(answers: Sequence[str], others: Sequence[str]) -> float:
    """The share of answers that are the same; the first ones, if there are fewer others."""
    return sum(a == b for a, b in zip(answers, others, strict=False)) / len(others)


def cost_of_looking(folder: Path) -> None:
    """What a job pays for looking at prompts of which none begin alike."""
    timed = Timed(folder, ALL_DIFFERENT)
    rounds(ALL_DIFFERENT.rounds, timed.jobs())
    cpu = timed.cpu_s
    cost = ratio(cpu[JOB], cpu[JOB_IN_INPUT_ORDER])
    report(
        "prefixes-different",
        "Prompts of which none begin alike, on a CPU",
        ["prompts", "s of a core, input order", "s of a core, order chosen", "x"],
        [[len(timed.tokens), statistics.median(cpu[JOB_IN_INPUT_ORDER]), statistics.median(cpu[JOB]), cost]],
        [f"Medians of {ALL_DIFFERENT.rounds} rounds, there and back in turn, and of their ratios."],
    )


def better_template(folder: Path) -> None:
    """A table of five columns, with the template as somebody wrote it and with the one that `--dry-run` prints."""
    dice = random.Random(0)
    documents = ["".join(dice.choices(LETTERS, k=400)) for _ in range(32)]
    rows = [
        {
            "question": "".join(dice.choices(LETTERS, k=16)),
            "number": str(number),
            "document": documents[number // 8],
            "source": documents[number // 64][:40],
            "lang": "ab"[number // 128],
        }
        for number in range(256)
    ]
    dice.shuffle(rows)
    options: dict[str, Any] = {
        "max_num_seqs": SLOTS,
        "kv_cache_tokens": 8_192,
        "max_tokens": ANSWER,
        "ignore_eos": True,
    }
    with tempfile.TemporaryDirectory() as place:
        config = EngineConfig(task="generate", model=str(folder))
        plan = jobs.check(JobSettings(rows, Path(place, "out.jsonl"), config, prompt_template=FIELDS))
        engine = GenerationEngine(Generation(model=folder, **options))
        found = survey_prompts(jobs.build(plan, engine, StopRequest(), lambda _: None))
        engine.close()
    assert found is not None, "this engine reads common beginnings once"
    assert found.template is not None, "this table has a better template"
    table: list[list[Any]] = []
    for template in (FIELDS, found.template):
        started, cpu = time.perf_counter(), time.process_time()
        outcome = job(folder, rows, "auto", options, template)
        table.append([template, time.perf_counter() - started, time.process_time() - cpu, outcome.computed])
    report(
        "prefixes-fields",
        "The fields of a template in another order, on a CPU",
        ["template", "s", "s of a core", "prompt tokens computed", "x the first by seconds of a core"],
        [[*line, table[0][2] / line[2]] for line in table],
        ["256 shuffled rows about 32 documents of 400 tokens; the second template is the one that --dry-run prints."],
    )


def count_gsm8k(folder: Path, questions: Path) -> None:
    """Every question after the same 8 worked ones: how many of the prompt tokens the model reads."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    header = "".join(f"Q: {row['question']}\nA: {row['answer']}\n\n" for row in rows[:EXAMPLES])
    engine = GenerationEngine(
        Generation(model=folder, max_num_seqs=SLOTS, kv_cache_tokens=65_536, max_tokens=1, ignore_eos=True)
    )
    prepared = engine.prepare([f"{header}Q: {row['question']}\nA:" for row in rows])
    asks = [item.payload for item in prepared if not isinstance(item, Exception)]
    started = time.perf_counter()
    computed = ours(engine, asks).computed
    took = time.perf_counter() - started
    sent = sum(len(ask.prompt) for ask in asks)
    report(
        "prefixes-gsm8k",
        "gsm8k after 8 worked examples, prompt tokens read from the cache",
        ["questions", "prompt tokens sent", "computed", "computed / sent", "seconds"],
        [[len(asks), sent, computed, computed / sent, took]],
        ["Letters for tokens and random weights: the answers mean nothing, the tokens count."],
    )


def main() -> None:
    """The comparison, or with --gsm8k the count."""
    parts: dict[str, Callable[[Path], None]] = {
        "documents": partial(compare, size=FULL, name="prefixes", with_peer=False),  # the peer would take an hour
        "peer": partial(compare, size=WITH_PEER, name="prefixes-peer", with_peer=True),
        "different": cost_of_looking,
        "fields": better_template,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"default: {' '.join(parts)}")
    parser.add_argument("--small", "--quick", action="store_true")
    parser.add_argument("--gsm8k", type=Path, default=None, metavar="JSONL")
    given = parser.parse_args()
    if not set(given.parts) <= set(parts):
        parser.error(f"parts: {' '.join(parts)}")
    torch.set_num_threads(1)  # so small a model gains nothing from more, and is disturbed by everything
    with tempfile.TemporaryDirectory() as temporary:
        if given.gsm8k is not None:
            count_gsm8k(model_folder(Path(temporary), positions=8_192), given.gsm8k)
        elif given.small:
            compare(model_folder(Path(temporary)), SMALL, None, with_peer=True)
        else:
            folder = model_folder(Path(temporary))
            for part in given.parts or parts:
                parts[part](folder)


if __name__ == "__main__":
    main()
