"""Jobs on vLLM whose answers have a form, come several times, or are an adapter's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm.conftest import OPTIONS
from tests.integration.vllm.test_answers import answers, questions

import headrace
from headrace.app.loaded import LoadedModel

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["mood", "age"],
}
ROWS = [{"id": str(number), "text": text} for number, text in enumerate(questions(12))]


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[LoadedModel]:
    with headrace.load(
        "generate", model, engine="vllm", chat=False, seed=0, temperature=1.0, max_tokens=200, **OPTIONS
    ) as made:
        yield made


def job(loaded: LoadedModel, **settings: Any) -> list[dict[str, Any]]:
    return loaded.run(ROWS, sink="list", progress=False, **settings)


def test_answers_of_a_job_have_the_form_that_it_asks_for(loaded: LoadedModel) -> None:
    assert all(set(row["generation"]["parsed"]) == {"mood", "age"} for row in job(loaded, output_schema=SCHEMA))
    assert {row["generation"]["text"] for row in job(loaded, choices=("yes", "no"))} <= {"yes", "no"}
    assert all(row["generation"]["text"].isdigit() for row in job(loaded, answer_regex="[0-9]{4}"))


def test_several_answers_of_a_prompt_differ_and_each_has_the_form(loaded: LoadedModel) -> None:
    rows = job(loaded, n=3, output_schema=SCHEMA)
    assert [len(row["generation"]) for row in rows] == [3] * len(ROWS)
    assert all("parsed" in answer for row in rows for answer in row["generation"])
    assert any(len({answer["text"] for answer in row["generation"]}) > 1 for row in rows)


def test_adapters_answer_as_their_merged_weights_also_beside_each_other_in_one_job(model: Path, tmp_path: Path) -> None:
    import torch
    from tests.integration.engines.test_adapters import ALPHA, RANK, adapter, halves
    from transformers import AutoModelForCausalLM

    from headrace.engines.vllm.engine import VllmEngine
    from headrace.engines.vllm.options import VllmGeneration

    layers = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = halves(module, layers)
    folder = adapter(tmp_path / "adapter", weights, target_modules=["q_proj", "down_proj"])
    for layer in layers:
        change = weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"] * (ALPHA / RANK)
        module.get_parameter(f"{layer}.weight").data += change
    merged = tmp_path / "merged"
    module.save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (merged / name).write_bytes((model / name).read_bytes())
    prompts = questions(6)
    turned = {name: -one if "lora_B" in name else one for name, one in weights.items()}
    other = adapter(tmp_path / "other", turned, target_modules=["q_proj", "down_proj"])
    found = []
    for options in ({"model": model, "adapter": str(folder)}, {"model": merged}):
        engine = VllmEngine(VllmGeneration(**options, max_tokens=12, chat=False, **OPTIONS))
        found.append([one["text"] for one in answers(engine, prompts) if isinstance(one, dict)])
        engine.close()
    names: list[dict[str, str]] = [{}, {"adapter": "support"}, {"model": "support"}, {"model": "legal"}]
    rows = [{"text": {"prompt": prompt, **name}} for prompt in prompts for name in names]
    folders = {"support": str(folder), "legal": str(other)}
    with headrace.load(
        "generate", model, engine="vllm", chat=False, adapters=folders, max_tokens=12, **OPTIONS
    ) as made:
        job = [row["generation"]["text"] for row in made.run(rows, sink="list", progress=False)]
        wrong = [{"text": {"prompt": "a", name: "third"}} for name in ("adapter", "model")]
        made.run(wrong, sink=tmp_path / "out.jsonl", max_error_rate=1, progress=False)
    plain, by_field, by_model, legal = (job[start::4] for start in range(4))
    assert found[0] == found[1] == by_field == by_model
    assert len({str(one) for one in (plain, by_model, legal)}) == 3
    refused = (tmp_path / "out.errors.jsonl").read_text()
    assert "adapter is 'third': the engine has support, legal" in refused
    assert f"there is no model 'third'; the model and its adapters are {model.name!r} and 'support'" in refused
