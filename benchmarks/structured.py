"""Answers of a given form by a model of random weights: how many parse, and what the form costs.

python -m benchmarks.structured
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import quick, report
from benchmarks.generation import model_folder
from headrace import ContinuousBatcher
from headrace.engines.choosing import registry
from headrace.jobs.answer_form import AnswerForm, InvalidAnswerError, schema_of

ROWS = 3 if quick() else 500
"""For each schema."""
TIMED = 60 if quick() else 200
"""Of all rows, those that a larger model is timed with."""
MOST_TOKENS = 256
ROUNDS = 1 if quick() else 3

_TEXT = {"type": "string", "maxLength": 12}
_PARTS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"enum": ["low", "middle", "high"]},
    _TEXT,
    {"type": "boolean"},
    {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 8},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
)


def schemas() -> list[dict[str, Any]]:
    """Twenty of them: all pairs in a row of the parts, with optional fields, and the same nested and in lists."""
    pairs = list(itertools.pairwise((*_PARTS, _PARTS[0])))
    flat = [{"type": "object", "properties": {"a": one, "b": two, "c": one}, "required": ["a", "b"]}
            for one, two in pairs]  # fmt: skip
    nested = [
        {
            "type": "object",
            "properties": {"inner": flat[number], "list": {"type": "array", "items": two, "maxItems": 2}},
            "required": ["inner", "list"],
        }
        for number, (_, two) in enumerate(pairs)
    ]
    return [schema_of(schema) for schema in (*flat, *nested)]


def answers(engine: Any, requests: Sequence[dict[str, Any]]) -> tuple[list[Any], float]:
    """The answers, and the seconds of a core that they took; preparing included."""

    async def main() -> list[Any]:
        async with ContinuousBatcher(
            engine, max_slots=engine.profile.max_in_flight, max_cost=engine.profile.max_cost
        ) as batcher:
            return [answer async for answer in batcher.map([one.payload for one in engine.prepare(requests)])]

    started = time.process_time()
    found = asyncio.run(main())
    return found, time.process_time() - started


def requests(rows: int) -> list[dict[str, Any]]:
    """Some prompts for each of the schemas."""
    rng = random.Random(0)
    return [
        {
            "prompt": "".join(rng.choices("abcdefghij +=0123456789", k=rng.randint(10, 60))),
            "structured_outputs": {"json": schema},
            "max_tokens": MOST_TOKENS,
            "temperature": 1.0,
            "seed": row,
        }
        for row, schema in itertools.product(range(rows), schemas())
    ]


def without_form(asks: Sequence[dict[str, Any]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """The same prompts for as many tokens of any kind."""
    kept = ("prompt", "temperature", "seed")
    return [
        {**{name: one[name] for name in kept}, "ignore_eos": True, "max_tokens": count}
        for one, count in zip(asks, tokens, strict=True)
    ]


def checked(asks: Sequence[dict[str, Any]], found: Sequence[Any]) -> tuple[int, int]:
    """How many answers are valid, and how many more were cut at the most tokens."""
    valid = cut = 0
    for one, answer in zip(asks, found, strict=True):
        form = AnswerForm.of_schema(one["structured_outputs"]["json"], 0, in_prompt=False)
        try:
            form.checked(answer)
            valid += 1
        except InvalidAnswerError as error:
            cut += not error.may_pass
    return valid, cut


def main() -> None:
    """Check all answers, and generate as many tokens without a form."""
    torch.set_num_threads(1)
    held = requests(ROWS)
    with tempfile.TemporaryDirectory() as temporary:
        small = model_folder(Path(temporary) / "small", 64, 2)
        engine = registry.create("generate", small, enable_prefix_caching=False, max_num_seqs=256)
        found, _ = answers(engine, held)
        engine.close()
        engine = registry.create("generate", model_folder(Path(temporary) / "timed"), enable_prefix_caching=False)
        counts = [answer["completion_tokens"] for answer in answers(engine, held[:TIMED])[0]]
        free = without_form(held[:TIMED], counts)
        times = [(answers(engine, free)[1], answers(engine, held[:TIMED])[1]) for _ in range(ROUNDS)]
        engine.close()
    valid, cut = checked(held, found)
    without, with_form = min(one for one, _ in times), min(two for _, two in times)
    tokens = sum(counts)
    rows: list[list[object]] = [
        ["answers", len(found)],
        ["valid", valid],
        ["cut at max_tokens", cut],
        ["invalid", len(found) - valid - cut],
        ["tokens of the timed", tokens],
        ["tokens/s of a core without a form", f"{tokens / without:,.0f}"],
        ["tokens/s of a core with it", f"{tokens / with_form:,.0f}"],
        ["speed with it, median of pairs", f"{statistics.median(one / two for one, two in times):.2f} x"],
    ]
    note = (
        f"{len(schemas())} schemas, {ROWS} prompts each, at most {MOST_TOKENS} tokens, temperature 1; a Llama of 0.1 M "
        "random weights with 99 tokens answers all, one of 4 M those that are timed, float32, one thread of torch; "
        f"without a form, the same prompts and as many tokens; the first {len(free):,} prompts {ROUNDS} times with and "
        "without, in turn. Tokens that a form leaves no choice for, such as the names of fields, take no steps of "
        "their own."
    )
    report("structured", "Answers of a given form", ["", "value"], rows, [note])


if __name__ == "__main__":
    main()
