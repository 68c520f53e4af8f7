"""A generated answer does not depend on its company: what differs is found when the model is loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.architectures import _alone, _generates, _in_steps
from tests.families import family_model, tokenizer

from headrace.engines.choosing.registry import create
from headrace.engines.generation import batch_invariance
from headrace.engines.generation.batch_invariance import Trial
from headrace.engines.generation.paged_attention import PagedModel, StepPart
from headrace.engines.generation.static import generate
from headrace.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_thread")

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}


FOUND = {
    "Rwkv": "one at a time",
    "BigBirdPegasus": "equal lengths",
    "Blenderbot": "equal lengths",
    "Git": "equal lengths",
}


@pytest.mark.filterwarnings("default")  # of transformers, at making some of the models
@pytest.mark.parametrize(
    "family",
    ["Rwkv", "Blenderbot", *(pytest.param(more, marks=pytest.mark.thorough) for more in ("BigBirdPegasus", "Git"))],
)
def test_what_differs_beside_others_is_batched_otherwise(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    family_model(tmp_path, family, "ForCausalLM")
    assert _generates(tmp_path, "static").startswith("right")
    for name in ("static", "torch"):
        caplog.clear()
        engine = create("generate", tmp_path, engine=name, device="cpu", max_model_len=200)
        assert engine._padding == FOUND[family]
        reason = "cannot be batched continuously: its attention does not support a paged cache; prompts run in static"
        assert (reason in caplog.text) == (name == "torch")
        assert caplog.text.count("which is slower") == 1 + (name == "torch")
    with pytest.raises(EngineError, match="does not support a paged cache; use the engine static, or vllm"):
        create("generate", tmp_path, device="cpu", max_model_len=200, enable_prefix_caching=True)


def test_a_model_that_differs_beside_others_is_not_batched_continuously(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = family_model(tmp_path, "Llama", "ForCausalLM")
    run = PagedModel.run

    def neighbours(paged: PagedModel, parts: Sequence[StepPart]) -> torch.Tensor:
        logits = run(paged, parts)
        return logits + 0.1 * logits.roll(1, 0)

    monkeypatch.setattr(PagedModel, "run", neighbours)
    engine = create("generate", folder, device="cpu", max_model_len=200)
    assert engine.profile.batching == "batches"
    assert "its answers beside others would not be those that it gives alone; prompts run in static" in caplog.text


def longrope(folder: Path) -> Path:
    return family_model(folder, "Phi3", "ForCausalLM", **LONGROPE)


def test_rope_of_two_kinds_is_batched_where_all_stay_within_the_shorter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longrope(tmp_path)
    assert create("generate", tmp_path, engine="torch", device="cpu", max_model_len=200).profile.batching == "batches"
    assert "longer than 64 tokens; set max_model_len to 64 or less; prompts run in static batches" in caplog.text
    within = create("generate", tmp_path, engine="torch", device="cpu", max_model_len=64)
    static = create("generate", tmp_path, engine="static", device="cpu", max_model_len=200)
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 300) for _ in range(length)] for length in (5, 90, 20, 58, 62, 150, 5)]
    bodies = [{"prompt": prompt, "max_tokens": 12, "ignore_eos": True} for prompt in prompts]
    asks = [one.payload for one in static.prepare(bodies)]
    alone = [static.forward([ask])[0] for ask in asks]
    expected = [_alone(static, prompt, 12) for prompt in prompts]
    assert [answer["text"] for answer in alone] == expected
    assert static.forward(asks) == alone
    short = [place for place, prompt in enumerate(prompts) if len(prompt) + 12 <= 64]
    asked = [one.payload for one in within.prepare([bodies[place] for place in short])]
    assert [answer["text"] for answer in _in_steps(within, asked)] == [expected[place] for place in short]


WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 60},
    "Llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
    | {"max_position_embeddings": 100},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_the_long_prompt_of_the_check_is_beyond_what_changes_the_model(tmp_path: Path, family: str) -> None:
    folder = family_model(tmp_path, family, "ForCausalLM", **WINDOWS[family])
    engine = create("generate", folder, engine="static", device="cpu")
    trial = Trial(engine._lm, partial(generate, engine._lm))
    changes = WINDOWS[family].get("sliding_window") or 100
    assert max(len(ask.prompt) for ask in trial._asks) == min(changes + 4, engine._lm.max_model_len - 3)


def test_a_prompt_of_the_check_costs_a_large_model_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_model(tmp_path, "Mistral", "ForCausalLM", sliding_window=100)
    engine = create("generate", folder, engine="static", device="cpu")
    monkeypatch.setattr(batch_invariance, "OPERATIONS", 1.0)  # as if it were large
    trial = Trial(engine._lm, partial(generate, engine._lm))
    assert [len(ask.prompt) for ask in trial._asks] == [4, 36, 4, 36]


@pytest.mark.parametrize("length", [2, 3, 5, 12])
def test_a_model_of_a_short_context_is_tried_too(tmp_path: Path, length: int) -> None:
    folder = family_model(tmp_path, "Llama", "ForCausalLM")
    for name in ("static", "torch"):
        engine = create("generate", folder, engine=name, device="cpu", max_model_len=length)
        assert engine.profile.max_model_len == length


@pytest.mark.filterwarnings("default")  # of transformers, at making the model
def test_layers_with_heads_of_several_widths_are_batched_continuously(tmp_path: Path) -> None:
    words = tokenizer("decoder")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    own = {"head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8}
    config = transformers.Gemma4TextConfig(
        vocab_size=len(words),
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_kv_shared_layers=0,
        **sizes,
        **own,
    )
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    words.save_pretrained(str(tmp_path))
    engine, static = (create("generate", tmp_path, engine=name, device="cpu") for name in ("torch", "static"))
    assert len({shape.key_width for shape in engine._shapes.shapes}) == 2
    asks = [one.payload for one in static.prepare([{"prompt": "the mill " * n, "max_tokens": 9} for n in range(1, 9)])]
    assert _in_steps(engine, asks) == [static.forward([ask])[0] for ask in asks]
