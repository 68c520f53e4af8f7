"""Every key of a model's generation settings is obeyed, changes nothing, or is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.architectures import _in_steps
from tests.families import change, family_model
from transformers import AutoModelForCausalLM, GenerationConfig

from headrace.engines.choosing.registry import create
from headrace.engines.generation.model_rules import IRRELEVANT, OBEYED
from headrace.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["the canal feeds", "so that it never runs dry in 1987", "mill", "c"]
TOKENS = 10
VALUES: dict[str, Any] = {
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 50.0,
    "exponential_decay_length_penalty": [2, 3.0],
    "forced_bos_token_id": 9,
    "forced_eos_token_id": 3,
    "min_length": 9,
    "no_repeat_ngram_size": 1,
    "remove_invalid_values": True,
}
"""Of keys that are obeyed; those of the others are the first tokens of plain answers."""
WITH: dict[str, dict[str, Any]] = {
    "encoder_no_repeat_ngram_size": {"encoder_repetition_penalty": 50.0},  # which makes the prompt's tokens likely
    "min_length": {"sequence_bias": [[[3], 100.0]]},  # which ends an answer at once
}
"""What else a model asks for, so that the key makes a difference."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model(tmp_path_factory.mktemp("llama"), "Llama", "ForCausalLM")


def settings(folder: Path, **values: Any) -> Path:
    """The same model with these generation settings."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 0, **values}))
    return folder


def engine_of(folder: Path, name: str, **options: Any) -> Any:
    return create("generate", folder, engine=name, device="cpu", max_model_len=100, max_tokens=TOKENS, **options)


def answers(engine: Any, bodies: list[Any]) -> list[str]:
    asks = [one.payload for one in engine.prepare(bodies)]
    found = _in_steps(engine, asks) if engine.profile.batching == "steps" else engine.forward(asks)
    return [str(answer["text"]) for answer in found]


def alone(folder: Path, engine: Any) -> list[str]:
    """By transformers' `generate` with the model's settings."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(str(folder))
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([engine.tokenize(prompt, add_special_tokens=True)])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        found.append(engine._lm._tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True))
    return found


@pytest.mark.parametrize("key", sorted(OBEYED))
def test_a_rule_is_obeyed_as_transformers_does(folder: Path, key: str) -> None:
    others = WITH.get(key, {})
    engine = engine_of(settings(folder, **others), "static")
    plain = alone(folder, engine)
    first = [engine.tokenize(text, False)[:1] for text in plain if text]
    value: Any = VALUES.get(key)
    if key == "bad_words_ids":
        value = first
    elif key == "sequence_bias":
        value = [[one, -100.0] for one in first]
    elif value is None:
        value = sorted({token for one in first for token in one})
    settings(folder, **others, **{key: value})
    engines = [engine_of(folder, name) for name in ("static", "torch")]
    expected = alone(folder, engines[0])
    assert [answers(engine, PROMPTS) for engine in engines] == [expected] * 2
    assert (expected != plain) == (key != "remove_invalid_values")
    assert not _said(folder)


def _said(folder: Path) -> str:
    """What is said when the model is loaded."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("headrace")
    log.addHandler(handler)
    try:
        engine_of(folder, "static").close()
    finally:
        log.removeHandler(handler)
    return "\n".join(records)


NEITHER = {"transformers_version", "_from_model_config"}
KEYS = sorted(set(GenerationConfig().to_dict()) - OBEYED - IRRELEVANT - NEITHER)
"""transformers' own list."""
SET: dict[str, Any] = {
    "max_new_tokens": 7,
    "max_length": 30,
    "min_new_tokens": 3,
    "max_time": 3.0,
    "stop_strings": ["wheel"],
    "do_sample": True,
    "num_beams": 3,
    "guidance_scale": 1.5,
    "token_healing": True,
    "dola_layers": "low",
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
}
SAMPLED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "top_h": 0.4, "typical_p": 0.5}
SAMPLED |= {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_not_obeyed_is_named(folder: Path, key: str) -> None:
    if key == "num_return_sequences":
        settings(folder, do_sample=True, num_return_sequences=2)
    elif key == "watermarking_config":
        settings(folder, watermarking_config={"bias": 2.0})
    else:
        value = SET.get(key, SAMPLED.get(key, 1.5))
        settings(folder, **{key: value}, **({"do_sample": True} if key in SAMPLED else {}))
    said = _said(folder)
    assert f" {key} " in said and "not applied" in said


def test_the_way_out_is_named_and_a_request_takes_it(folder: Path) -> None:
    settings(folder, do_sample=True, temperature=0.6, repetition_penalty=1.3, max_new_tokens=7)
    assert "set max_tokens=7, temperature=0.6, repetition_penalty=1.3" in _said(folder)
    engine = engine_of(folder, "static")
    assert len(answers(engine, [{"prompt": "mill", "max_tokens": 7, "repetition_penalty": 1.3}])) == 1


def test_what_sampling_alone_would_apply_is_not_named_for_a_greedy_model(folder: Path) -> None:
    settings(folder, top_k=20, temperature=0.3, max_length=4096)
    assert not _said(folder)


def test_an_invalid_rule_is_refused_when_the_model_is_loaded(folder: Path) -> None:
    settings(folder, no_repeat_ngram_size="two")
    with pytest.raises(EngineError, match="no_repeat_ngram_size"):
        engine_of(folder, "static")


def test_a_rule_of_config_json_is_obeyed_beside_others(folder: Path, tmp_path: Path) -> None:
    """As Blenderbot has its forced end."""
    import shutil

    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    change(tmp_path / "model", forced_eos_token_id=3)
    engine = engine_of(tmp_path / "model", "torch")
    bodies = [{"prompt": prompt, "max_tokens": most} for prompt, most in zip(PROMPTS, (3, 9, 5, 7), strict=True)]
    asks = [one.payload for one in engine.prepare(bodies)]
    assert [answer["finish_reason"] for answer in _in_steps(engine, asks)] == ["stop"] * 4
