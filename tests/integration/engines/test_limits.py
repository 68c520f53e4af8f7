"""What a model's positions, special tokens and context allow is kept to."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.families import change, family_model

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.errors import ConfigError, RecordError

TEXT = "the canal feeds the mill " * 200


@pytest.mark.parametrize("task", ["classify", "embed"])
def test_a_long_text_is_cut_at_what_the_positions_allow(tmp_path: Path, task: str) -> None:
    folder = family_model(tmp_path, "Roberta", "Model" if task == "embed" else "ForSequenceClassification")
    engine = create(task, folder, device="cpu")
    [ready] = engine.prepare([TEXT])
    assert (engine.profile.max_model_len, ready.cost, ready.truncated) == (256, 256, True)
    assert len(engine.forward([ready.payload])) == 1
    with pytest.raises(ConfigError, match=r"max_model_len is 257; this model takes . to 256 tokens"):
        create(task, folder, device="cpu", max_model_len=257)


def test_an_empty_text_is_refused_where_nothing_stands_for_it(tmp_path: Path) -> None:
    engine = create("embed", family_model(tmp_path, "GPT2"), device="cpu")
    refused, taken = engine.prepare(["", "a"])
    assert isinstance(refused, RecordError)
    assert "has no tokens for this model" in str(refused)
    assert isinstance(taken, Prepared)


def test_the_activation_that_sentence_transformers_keeps_beside_a_cross_encoder(tmp_path: Path) -> None:
    folder = family_model(tmp_path, "Bert", "ForSequenceClassification", ["x"])
    pair = ("the canal", "the mill")

    def score() -> float:
        engine = create("score", folder, device="cpu")
        found: float = engine.forward([engine.prepare([pair])[0].payload])[0]
        return found

    squeezed = score()
    change(folder, "config_sentence_transformers.json", activation_fn="torch.nn.modules.linear.Identity")
    raw = score()
    assert raw != squeezed
    assert squeezed == pytest.approx(1 / (1 + 2.718281828**-raw), abs=1e-4)
