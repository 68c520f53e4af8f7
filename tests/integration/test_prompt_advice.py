"""What is said about prompts holds for the model: the template that is named needs fewer tokens and less time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_prefix_caching import llama
from tests.settings import job_settings

from headrace.app.jobs import job as jobs
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.events import Event, PromptsCompared
from headrace.jobs.pipeline.job import StopRequest
from headrace.observe.reporting import advice

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


def test_the_template_that_a_report_names_has_fewer_tokens_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "TOO_SHORT_S", 0.0)  # this job takes less than a second
    monkeypatch.setattr(advice, "WORTH", 0.0)
    folder = llama(tmp_path / "llama", max_position_embeddings=512)

    def computed(template: str) -> tuple[int, str | None, PromptsCompared]:
        heard: list[Event] = []
        settings = job_settings(
            table(), tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", task="generate", model=str(folder),
            prompt_template=template, listeners=(heard.append,),
        )  # fmt: skip
        engine = GenerationEngine(
            Generation(model=folder, max_num_seqs=4, kv_cache_tokens=1024, max_tokens=2, ignore_eos=True)
        )
        with jobs.check(settings) as plan:
            _, report = jobs.carry_out(plan, engine, StopRequest(), progress=False)
        used = report.prefix_cache
        assert used is not None
        assert used.computed_s is not None
        assert 0 < used.computed_s < report.times.inference
        assert used.generated == 2 * len(table())
        named = [one.value for one in report.advices if one.setting == "--prompt-template" and one.gain_s > 0]
        return used.computed, *(named or [None]), *(one for one in heard if isinstance(one, PromptsCompared))

    now, better, compared = computed(TEMPLATE)
    assert better is not None
    assert compared.template == better
    then, none_left, followed = computed(better)
    assert now > 1.5 * then
    assert none_left is None
    assert followed.shared == pytest.approx(compared.better)
