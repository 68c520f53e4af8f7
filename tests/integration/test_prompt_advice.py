"""What a dry run says about prompts holds for the model: the template that it prints needs fewer tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.integration.test_prefix_caching import llama
from tests.settings import job_settings

from headrace.app.jobs import job as jobs
from headrace.engines.generation.continuous import GenerationEngine
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.planning.survey import survey_prompts

TEMPLATE = "{number}{question}{document}{source}{lang}="


def table() -> list[dict[str, Any]]:
    dice = random.Random(2)
    documents = ["".join(dice.choices("abcdefghij", k=300)) for _ in range(6)]
    rows = [
        {
            "number": f"{dice.randrange(10**6):06d}",
            "question": "".join(dice.choices("abcdefghij", k=10)),
            "document": document,
            "source": "abc" if place % 2 else "bcd",
            "lang": "aa" if place % 3 else "bb",
        }
        for place, document in enumerate(documents)
        for _ in range(6)
    ]
    dice.shuffle(rows)
    return rows


def test_the_template_of_a_dry_run_has_fewer_tokens_computed(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama", max_position_embeddings=512)

    def computed(template: str) -> tuple[int, str | None]:
        settings = job_settings(
            table(), tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", task="generate", model=str(folder),
            prompt_template=template,
        )  # fmt: skip
        engine = GenerationEngine(folder, max_num_seqs=4, kv_cache_tokens=1024, max_tokens=2, ignore_eos=True)
        job = jobs.build(jobs.check(settings), engine, StopRequest(), lambda _: None)
        found = survey_prompts(job)
        assert found is not None
        main_path.run(job)
        tokens = engine.prefix_cache_stats().computed
        engine.close()
        return tokens, found.template

    now, better = computed(TEMPLATE)
    assert better is not None
    then, none_left = computed(better)
    assert now > 1.5 * then
    assert none_left is None
