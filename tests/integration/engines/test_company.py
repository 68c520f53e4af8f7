"""An output does not depend on its company, whatever the family of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import FAMILIES, change, family_model
from transformers import AutoModelForSequenceClassification

from headrace.engines.choosing.registry import create

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [
    "the canal",
    "so that it never runs dry in 1987 " * 9,
    "mill",
    "its wheel turns and feeds the canal " * 3,
    "a b c",
    "the mill and its wheel " * 17,
]
OTHERS = ["never", "the canal feeds the mill", "1987 " * 30]
IN_A_ROW = ("Bert", "Roberta", "Albert", "DistilBert", "Electra", "GPT2", "ModernBert")
SETTLED = {"FNet": "equal lengths", "ConvBert": "equal lengths", "BigBird": "equal lengths", "XLNet": "left"}
SETTLED |= dict.fromkeys(IN_A_ROW, "packed")
EVERY = [
    pytest.param(family, marks=pytest.mark.thorough if family in ("Roberta", "Albert", "DistilBert", "Electra") else ())
    for family in FAMILIES
]
"""All families, of which those four are laid out and attend as BERT does."""


def numbers(engine: Any, inputs: list[Any]) -> np.ndarray[Any, Any]:
    ready = engine.prepare(inputs)
    found = engine.forward([one.payload for one in ready])
    if isinstance(found[0], dict):
        return np.array([[s for _, s in sorted(zip(one["labels"], one["scores"], strict=True))] for one in found])
    return np.array(found).reshape(len(found), -1)


def holds(engine: Any, inputs: list[Any]) -> None:
    """Alone, together and backwards are the same, and differ from input to input."""
    alone = np.concatenate([numbers(engine, [one]) for one in inputs])
    assert np.ptp(alone, axis=0).max() > 1e-3
    for _ in range(2):
        np.testing.assert_allclose(numbers(engine, inputs), alone, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(numbers(engine, inputs[::-1])[::-1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EVERY)
def test_labels_are_those_of_the_text_alone(tmp_path: Path, family: str) -> None:
    folder = family_model(tmp_path, family, "ForSequenceClassification", ["a", "b", "c"])
    engine = create("classify", folder, device="cpu", top_labels=3, max_model_len=200)
    holds(engine, TEXTS)
    assert engine._rows.padding == SETTLED.get(family, "right")


@pytest.mark.parametrize("family", EVERY)
def test_a_score_is_that_of_the_pair_alone(tmp_path: Path, family: str) -> None:
    folder = family_model(tmp_path, family, "ForSequenceClassification", ["x"])
    engine = create("score", folder, device="cpu", max_model_len=200)
    holds(engine, [(text, other) for text in TEXTS for other in OTHERS])


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3"])
@pytest.mark.parametrize("task", ["classify", "score"])
def test_a_decoder_without_a_padding_token_is_padded_all_the_same(tmp_path: Path, family: str, task: str) -> None:
    """Also where a text ends with a token that others use for padding."""
    folder = family_model(tmp_path, family, "ForSequenceClassification", ["a", "b", "c"] if task == "classify" else "a")
    change(folder, pad_token_id=None)
    change(folder, "tokenizer_config.json", pad_token=None)
    plain = AutoModelForSequenceClassification.from_pretrained(str(folder))
    assert plain.config.pad_token_id is None
    options = {"top_labels": 3} if task == "classify" else {}
    engine = create(task, folder, device="cpu", max_model_len=200, **options)
    assert engine._rows.padding == "packed"
    texts = [*TEXTS, "the mill</s>", "the mill</s></s><s>", "</s>"]
    inputs: list[Any] = texts if task == "classify" else [(text, other) for text in texts for other in OTHERS]
    holds(engine, inputs)
    ready = [one.payload for one in engine.prepare(inputs)]
    with torch.inference_mode():
        logits = [plain(torch.from_numpy(one[:1].astype("int64"))).logits[0] for one in ready]
    if task == "classify":
        expected = np.array([row.softmax(-1).numpy() for row in logits])
    else:
        expected = np.array([row.sigmoid().numpy() for row in logits])
    for padding in ("packed", "right"):
        engine._rows.padding = padding
        np.testing.assert_allclose(numbers(engine, inputs), expected, rtol=1e-4, atol=1e-4)
