"""What a folder says it is, is obeyed or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.choosing.registry import create
from headrace.engines.library_settings import with_own_settings
from headrace.engines.model_kinds import check_kind, warn_unused_head
from headrace.errors import ConfigError

ST = "sentence_transformers.base.modules.transformer.Transformer"
POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
SPLADE = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
STATIC = "sentence_transformers.models.StaticEmbedding"
LOGIT = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
ONE = {"0": "LABEL_0"}


def folder(path: Path, architecture: str | None, steps: tuple[str, ...] = (), told: str = "", **more: Any) -> Path:
    """A model's folder, as far as its kind can be seen from it."""
    files = more.pop("files", ())
    names = {"architectures": [architecture]} if architecture else {}
    (path / "config.json").write_text(json.dumps(names | more))
    (path / "model.safetensors").write_bytes(b"")
    for name in files:
        (path / name).write_text("{}")
    if steps:
        (path / "modules.json").write_text(json.dumps([{"type": step, "path": ""} for step in steps]))
    if told:
        (path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": told}))
    return path


@pytest.mark.parametrize(
    ("task", "made", "words"),
    [
        ("embed", ("BertForMaskedLM", (ST, SPLADE), "SparseEncoder"), "sparse .SPLADE. encoder.*SpladePooling"),
        ("embed", ("BertModel", (ST, POOLING), "SparseEncoder"), "sparse .*model_type SparseEncoder"),
        ("embed", ("BertModel", (ST,), "MultiVectorEncoder"), "multi-vector .ColBERT. encoder"),
        ("embed", ("BertModel", (ST,), "ColBERT"), "multi-vector"),
        ("embed", ("BertModel", (ST, "pylate.models.Dense.Dense")), "multi-vector.*pylate"),
        ("embed", ("HF_ColBERT",), "multi-vector .*HF_ColBERT"),
        ("classify", (None, (STATIC,)), "static embeddings.*use the task embed"),
        ("embed", ("StaticModel",), "table of word vectors"),
        ("embed", ("BertForTokenClassification",), "token classifier .BertForTokenClassification.*custom engine"),
        ("embed", ("BertForQuestionAnswering",), "question answering"),
        ("embed", ("BertForMultipleChoice",), "multiple choice"),
        ("embed", ("BertForSequenceClassification",), "use the task classify"),
        ("embed", ("BertForSequenceClassification", (), "", ONE), "cross-encoder.*use the task score"),
        ("embed", ("BertForSequenceClassification", (ST,), "CrossEncoder"), "use the task score"),
        ("embed", ("WhisperForConditionalGeneration",), "speech model"),
        ("embed", ("ViTForImageClassification",), "use the task image-classify"),
        ("classify", ("BertModel", (ST, POOLING)), "embedding model.*use the task embed"),
        ("classify", ("BertModel",), "without a head .BertModel."),
        ("classify", ("DebertaV2ForTokenClassification",), "token classifier"),
        ("score", ("BertForMaskedLM",), "masked language model"),
        ("score", ("Qwen3ForCausalLM", (ST, LOGIT), "CrossEncoder"), "reranker that reads its score"),
        ("zero-shot", ("GPT2LMHeadModel",), "use the task generate"),
        ("generate", ("BertForMaskedLM",), "masked language model"),
        ("generate", ("BertForPreTraining",), "masked language model"),
        ("generate", ("T5ForConditionalGeneration",), "encoder-decoder"),
        ("generate", ("WhisperForConditionalGeneration",), "speech model"),
        ("generate", ("Qwen3ForCausalLM", (ST, POOLING)), "embedding model"),
        ("image-classify", ("BertForSequenceClassification",), "classifier of texts"),
        ("image-embed", ("BertModel",), "without a head"),
        ("image-embed", ("GPT2LMHeadModel",), "language model"),
    ],
)
def test_a_model_made_for_something_else_is_refused(tmp_path: Path, task: str, made: Any, words: str) -> None:
    architecture, steps, told, labels = (*made, *((), "", None)[len(made) - 1 :])
    path = folder(tmp_path, architecture, steps, told, **({"id2label": labels} if labels else {}))
    with pytest.raises(ConfigError, match=words) as caught:
        create(task, path)
    assert f"the task {task} cannot use" in str(caught.value)
    if task != "generate":
        with pytest.raises(ConfigError, match=words):
            create(task, path, engine="onnx")


@pytest.mark.parametrize(
    ("task", "made"),
    [
        ("embed", ("BertModel",)),
        ("embed", ("BertForMaskedLM",)),
        ("embed", ("BertForTokenClassification", (ST, POOLING))),
        ("embed", ("BertModel", (ST, POOLING), "SentenceTransformer")),
        ("embed", ("T5EncoderModel",)),
        ("embed", (None, (STATIC,))),
        ("embed", ("NewModel",)),
        ("embed", ("SomebodysOwn",)),
        ("embed", (None,)),
        ("classify", ("BertForSequenceClassification",)),
        ("classify", ("SomebodysOwn",)),
        ("score", ("BertForSequenceClassification", (ST,), "CrossEncoder")),
        ("generate", ("GPT2LMHeadModel",)),
        ("generate", ("BartForCausalLM",)),
        ("image-classify", ("ResNetForImageClassification",)),
    ],
)
def test_what_suits_or_says_nothing_is_taken(tmp_path: Path, task: str, made: Any) -> None:
    check_kind(task, folder(tmp_path, *made))


def test_models_of_images_are_told_from_those_of_texts(tmp_path: Path) -> None:
    vit = folder(tmp_path, "ViTModel", files=["preprocessor_config.json"])
    check_kind("image-embed", vit)
    with pytest.raises(ConfigError, match=r"image model .*use the task image-embed"):
        check_kind("embed", vit)
    clip = folder(tmp_path, "CLIPModel", files=["tokenizer.json"], vision_config={})
    check_kind("image-embed", clip)
    sees_and_writes = folder(tmp_path, "Gemma3ForConditionalGeneration", text_config={}, vision_config={})
    check_kind("generate", sees_and_writes)


def test_what_is_no_folder_is_left_to_who_loads_it(tmp_path: Path) -> None:
    check_kind("generate", "some/name")
    check_kind("embed", None)
    (tmp_path / "config.json").write_text("not JSON")
    check_kind("embed", tmp_path)


def test_what_sentence_transformers_keeps_beside_a_cross_encoder_is_read(tmp_path: Path) -> None:
    told = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"q": "query: "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(told))
    found = with_own_settings(tmp_path, {"a": 1})
    assert found == {"a": 1, "sentence_transformers": {"activation_fn": told["activation_fn"]}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(told | {"default_prompt_name": "q"}))
    with pytest.raises(ConfigError, match="puts the prompt 'query: ' before its texts"):
        with_own_settings(tmp_path, {})


def test_the_weights_of_another_engine_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path, "BertModel")
    with pytest.raises(ConfigError, match="it holds PyTorch weights: leave the engine out"):
        create("embed", path, engine="onnx")
    (path / "model.safetensors").rename(path / "model.onnx")
    with pytest.raises(ConfigError, match="it is an ONNX model: choose the engine onnx"):
        create("embed", path)


@pytest.mark.parametrize("name", ["splade-v3", "plain"])
def test_a_masked_language_model_is_embedded_with_a_warning_or_refused_by_its_name(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).mkdir()
    path = folder(tmp_path / name, "BertForMaskedLM")
    if name == "plain":
        warn_unused_head("embed", path)
        assert "(BertForMaskedLM) without files of sentence-transformers: its head is not used" in caplog.text
        assert "the mean of its token vectors" in caplog.text
        return
    with pytest.raises(ConfigError, match=r"sparse .SPLADE. encoder.*BertForMaskedLM, its folder's name"):
        create("embed", path)
    path.rename(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "naver/Splade_v2", ', 1))
    with pytest.raises(ConfigError, match=r"_name_or_path in config\.json"):
        create("embed", tmp_path / "other")
    assert not caplog.text


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2LMHeadModel"])
def test_nothing_is_said_of_other_models(tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_unused_head("embed", folder(tmp_path, architecture))
    assert not caplog.text
