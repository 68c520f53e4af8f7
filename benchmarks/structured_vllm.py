"""Answers of a given form through vLLM: what the form costs there, and vLLM's own `LLM.generate` with the same forms.

.venv-vllm/bin/python -m benchmarks.structured_vllm   # see scripts/install-vllm
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.vllm import OPTIONS, leave_core  # first: it tells vLLM where to run, and to be quiet

# isort: split
import vllm
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.generation import model_folder
from benchmarks.structured import MOST_TOKENS, checked, requests, without_form
from headrace.batching.passthrough import PassthroughBatcher
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.options import VllmGeneration

ROWS = 2 if quick() else 15
"""For each schema."""
ROUNDS = 1 if quick() else 3
WHOLE = {**OPTIONS, "max_num_batched_tokens": 16_384}
"""All prompts fit a step: vLLM's CPU build ends when it reads the prompt of a request with a seed in two."""
Asks = Sequence[dict[str, Any]]


def ours(engine: VllmEngine, asks: Asks) -> list[tuple[str, int]]:
    """Texts and numbers of tokens, preparing included."""

    async def main() -> list[Any]:
        async with PassthroughBatcher(engine.infer, max_in_flight=engine.profile.max_in_flight) as batcher:
            return [answer async for answer in batcher.map([one.payload for one in engine.prepare(asks)])]

    return [(answer["text"], answer["completion_tokens"]) for answer in asyncio.run(main())]


def own(model: vllm.LLM, asks: Asks) -> list[tuple[str, int]]:
    """The same by `LLM.generate`, all prompts at once."""
    params = [
        vllm.SamplingParams(
            **{name: value for name, value in ask.items() if name not in ("prompt", "structured_outputs")},
            structured_outputs=StructuredOutputsParams(**form) if (form := ask.get("structured_outputs")) else None,
        )
        for ask in asks
    ]
    outputs = model.generate([ask["prompt"] for ask in asks], params, use_tqdm=False)
    return [(one.outputs[0].text, len(one.outputs[0].token_ids)) for one in outputs]


def main() -> None:
    """Measure in turn and print."""
    held = requests(ROWS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        whole = vllm.LLM(str(folder), disable_log_stats=True, **WHOLE)
        engine = VllmEngine(VllmGeneration(model=folder, chat=False, **WHOLE))
        found = ours(engine, held)  # the first compiles the forms
        free = without_form(held, [count for _, count in found])
        same = sum(one == two for one, two in zip(found, own(whole, held), strict=True))
        leave_core(0)
        variants: dict[str, Callable[[], object]] = {
            "vLLM, `LLM.generate`, with the form": partial(own, whole, held),
            "headrace, with the form": partial(ours, engine, held),
            "vLLM, without a form": partial(own, whole, free),
            "headrace, without a form": partial(ours, engine, free),
        }

        def seconds(name: str) -> float:
            started = time.perf_counter()
            variants[name]()
            return time.perf_counter() - started

        times = rounds(ROUNDS, {name: partial(seconds, name) for name in variants})
        engine.close()
    answers = [{"text": text, "finish_reason": "length" if count == MOST_TOKENS else "stop"} for text, count in found]
    valid, cut = checked(held, answers)
    tokens = sum(count for _, count in found)
    with_form = times["headrace, with the form"]
    rows = [[name, round(tokens / statistics.median(taken)), ratio(taken, with_form)] for name, taken in times.items()]
    report(
        "structured_vllm",
        "Answers of a given form through vLLM on a CPU",
        ["variant", "tokens/s", "headrace with the form is x times as fast"],
        rows,
        [
            (
                f"{len(held)} prompts with 20 schemas, {tokens:,} answer tokens, temperature 1; a "
                f"Llama of 4 M random weights, float32; without a form, the same prompts and as many tokens."
            ),
            (
                f"Answers of headrace: {valid} valid, {cut} cut at the most tokens, {len(held) - valid - cut} invalid; "
                f"{same} equal to those of `LLM.generate`."
            ),
            f"Medians of {ROUNDS} rounds, in turn; one core for the model.",
        ],
    )


if __name__ == "__main__":
    main()
