"""Labels and scores are those of transformers' pipelines and sentence-transformers' cross-encoders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from tests.small_models import NLI, text_model
from transformers import BertConfig, BertModel, pipeline

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.engines.model_folder import find_folder
from headrace.errors import ConfigError, EngineError, RecordError

TEXTS = ["Parse a mail header.", "a", "the event loop waits " * 9, "Draw a widget on the canvas.", "naïve 水車"]
PAIRS = [("the wheel turns", "the mill works"), ("a", ""), ("a canal " * 20, "full of water"), ("x", "y " * 200)]


def outputs(engine: Any, inputs: Sequence[Any]) -> list[Any]:
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return list(engine.forward([one.payload for one in ready]))


def test_the_same_labels_and_scores_as_the_pipeline() -> None:
    folder = str(find_folder("docstrings"))
    peer = pipeline("text-classification", folder, device="cpu", dtype=torch.float32)
    expected = peer(TEXTS, top_k=3, truncation=True)
    engine = create("classify", "docstrings", device="cpu", top_labels=3)
    for ours, theirs in zip(outputs(engine, TEXTS), expected, strict=True):
        assert ours["labels"] == [one["label"] for one in theirs]
        assert ours["scores"] == pytest.approx([one["score"] for one in theirs], abs=1e-5)
        assert (ours["label"], ours["score"]) == (ours["labels"][0], ours["scores"][0])


def test_the_small_classifier_knows_what_a_docstring_is_about() -> None:
    engine = create("classify", "docstrings", device="cpu")
    questions = {
        "Return a new event loop.": "concurrency",
        "Parse the headers of an email message.": "mail",
        "Create a window with a button widget.": "gui",
        "Fail the test unless the two objects are equal.": "testing",
    }
    assert [one["label"] for one in outputs(engine, list(questions))] == list(questions.values())
    assert "scores" not in outputs(engine, ["a"])[0]


@pytest.mark.parametrize(("kind", "total"), [("multi_label_classification", None), (None, 1.0)])
def test_labels_exclude_each_other_where_the_model_says_so(
    tmp_path: Path, kind: str | None, total: float | None
) -> None:
    folder = text_model(tmp_path, ["one", "two", "three"], problem_type=kind)
    [ours] = outputs(create("classify", folder, device="cpu", top_labels=3), ["some text"])
    [theirs] = pipeline("text-classification", str(folder), device="cpu", dtype=torch.float32)(["some text"], top_k=3)
    assert ours["scores"] == pytest.approx([one["score"] for one in theirs], abs=1e-5)
    assert total is None or sum(ours["scores"]) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_the_same_scores_of_pairs_as_a_cross_encoder(tmp_path: Path, activation: str | None) -> None:
    folder = text_model(tmp_path, ["score"])
    if activation:
        config = json.loads((folder / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": activation}
        (folder / "config.json").write_text(json.dumps(config))
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    ours = outputs(create("score", folder, device="cpu"), PAIRS)
    assert ours == pytest.approx([float(score) for score in expected], abs=1e-5)
    assert (min(ours) < 0 or max(ours) > 1) == bool(activation)


@pytest.mark.parametrize(
    ("options", "peer_options"),
    [
        ({}, {}),
        ({"hypothesis_template": "It is about {}."}, {"hypothesis_template": "It is about {}."}),
        ({"multi_label": True}, {"multi_label": True}),
    ],
    ids=["defaults", "template", "multi-label"],
)
@pytest.mark.parametrize("labels", [NLI, ("entailment", "neutral", "contradiction")], ids=["last", "first"])
def test_the_same_zero_shot_labels_as_the_pipeline(
    tmp_path: Path, labels: Sequence[str], options: dict[str, Any], peer_options: dict[str, Any]
) -> None:
    folder = text_model(tmp_path, labels)
    candidates = ["water", "a mill", "the wheel of time"]
    peer = pipeline("zero-shot-classification", str(folder), device="cpu", dtype=torch.float32)
    expected = peer(TEXTS, candidates, **peer_options)
    engine = create("zero-shot", folder, device="cpu", labels=candidates, **options)
    for ours, theirs in zip(outputs(engine, TEXTS), expected, strict=True):
        assert ours["labels"] == theirs["labels"]
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-5)


def test_zero_shot_costs_every_row_and_runs_them_within_the_budget(tmp_path: Path) -> None:
    folder = text_model(tmp_path, NLI)
    many = [f"label number {number}" for number in range(40)]
    engine = create("zero-shot", folder, device="cpu", labels=many)
    engine._row_tokens = 1024
    [ready] = engine.prepare(["a text " * 200])
    assert ready.truncated
    assert ready.cost == 40 * 128
    assert ready.cost <= engine.profile.batch_cost
    sizes: list[int] = []
    run = engine.network.run_texts
    engine.network.run_texts = lambda batch, packed: sizes.append(batch.lengths.sum()) or run(batch, packed)
    assert len(engine.forward([ready.payload])[0]["labels"]) == 40
    assert len(sizes) == 5
    assert max(sizes) <= 1024


def test_cost_is_the_exact_number_of_tokens_of_text_and_pair(tmp_path: Path) -> None:
    engine = create("classify", text_model(tmp_path), device="cpu")
    alone, pair = engine.prepare(["event loop", ("event", "loop")])
    assert (pair.cost - alone.cost, pair.cost) == (1, pair.payload.shape[1])
    assert set(pair.payload[1].tolist()) == {0, 1}


def test_labels_come_as_a_list_or_as_words_between_commas(tmp_path: Path) -> None:
    engine = create("zero-shot", text_model(tmp_path, NLI), device="cpu", labels="canal, mill ,wheel")
    assert sorted(outputs(engine, ["a"])[0]["labels"]) == ["canal", "mill", "wheel"]


@pytest.mark.parametrize(
    ("task", "labels", "options", "words"),
    [
        ("classify", ("no", "yes"), {"top_labels": 3}, "top_labels is 3; it must be between 1 and 2"),
        ("score", ("no", "yes"), {}, "gives 2 outputs per pair, not one score; use the task classify"),
        ("zero-shot", ("no", "yes"), {"labels": ["a"]}, "needs a natural language inference model"),
        ("zero-shot", NLI, {}, r"labels is \(\); it must be a list of unique, non-empty strings"),
        ("zero-shot", NLI, {"labels": ["a", "a"]}, "unique, non-empty strings"),
        ("zero-shot", NLI, {"labels": "a,,b"}, "unique, non-empty strings"),
        ("zero-shot", NLI, {"labels": ["a"], "hypothesis_template": "so"}, "must contain {} for the label"),
        ("zero-shot", NLI, {"labels": ["long " * 200]}, "leaves no room for a text in the model's 128 tokens"),
        ("classify", ("no", "yes"), {"max_model_len": 999}, "max_model_len is 999; this model takes 4 to 128 tokens"),
        ("classify", ("no", "yes"), {"labels": ["a"]}, "labels: .* has no such option; known: device, dtype"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, task: str, labels: Sequence[str], options: dict[str, Any], words: str
) -> None:
    folder = text_model(tmp_path, labels)
    with pytest.raises(ConfigError, match=words):
        create(task, folder, **{"device": "cpu"} | options)


def test_a_task_without_a_default_model_says_so() -> None:
    with pytest.raises(ConfigError, match="has no default model; set one"):
        create("classify")


def test_a_model_of_another_kind_is_refused_and_not_filled_with_random_numbers(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=2000)
    ).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(EngineError, match=r"not a sequence classifier: its weights lack classifier.bias.*unknown kind"):
        create("classify", folder, device="cpu")
    with pytest.raises(EngineError, match=r"it says it is a BertModel\); use the task embed"):
        create("classify", "all-MiniLM-L6-v2", device="cpu")


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(EngineError, match="cannot be loaded"):
        create("classify", folder, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_was_cut_off_is_to_be_copied_again(name: str, tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    with pytest.raises(EngineError, match=r"[^.]; a file is damaged: copy or download the folder again$"):
        create("classify", folder, device="cpu")


def test_a_folder_without_its_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        create("classify", folder, device="cpu")


def test_weights_larger_than_memory_end_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device here is full, so loading is made to say so."""

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = text_model(tmp_path)
    monkeypatch.setattr("headrace.engines.text.classification.AutoModelForSequenceClassification.from_pretrained", full)
    with pytest.raises(EngineError, match=r"does not fit: 0\.0 GB of weights; use a smaller model"):
        create("classify", folder, device="cpu")


def test_a_too_long_pair_fails_alone_when_the_user_says_so(tmp_path: Path) -> None:
    engine = create("score", text_model(tmp_path, ["x"]), device="cpu", max_model_len=12, on_too_long="error")
    good, bad = engine.prepare([("a", "b"), ("a " * 20, "b")])
    assert isinstance(good, Prepared)
    assert isinstance(bad, RecordError)
    assert "maximum of 12 tokens" in str(bad)
