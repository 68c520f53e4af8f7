"""Which files of a model are downloaded."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.models.files import onnx_weights, pickles, reason_without_weights, setting_files, torch_weights

SENTENCES = [
    ".gitattributes", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin", "README.md", "config.json", "model.safetensors", "modules.json",
    "onnx/config.json", "onnx/model.onnx", "onnx/model_O1.onnx", "openvino/openvino_model.xml", "pytorch_model.bin",
    "rust_model.ot", "tf_model.h5", "tokenizer.json", "train_script.py", "vocab.txt",
]  # fmt: skip
MODULES = ["", "1_Pooling", "2_Dense"]


def test_a_sentence_transformer_needs_the_folders_of_its_modules() -> None:
    assert setting_files(SENTENCES, MODULES) == [
        "1_Pooling/config.json", "2_Dense/config.json", "config.json", "modules.json", "tokenizer.json", "vocab.txt",
    ]  # fmt: skip
    assert torch_weights(SENTENCES, MODULES) == ["model.safetensors", "2_Dense/model.safetensors"]
    assert onnx_weights(SENTENCES) == ["onnx/model.onnx"]


def test_code_is_downloaded_only_if_asked_for() -> None:
    names = ["config.json", "modeling_own.py", "parts/layers.py", ".hidden/x.py"]
    assert setting_files(names) == ["config.json"]
    assert setting_files(names, code=True) == ["config.json", "modeling_own.py", "parts/layers.py"]


def test_chat_templates_beside_the_tokenizer_are_settings() -> None:
    names = ["chat_template.jinja", "additional_chat_templates/tools.jinja", "eval/results.json"]
    assert setting_files(names) == ["chat_template.jinja", "additional_chat_templates/tools.jinja"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "model.fp16.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (
            ["consolidated.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["pytorch_model.bin", "optimizer.pt", "training_args.bin"], ["pytorch_model.bin"]),
        (["weights.pt", "scheduler.pt"], ["weights.pt"]),
        (["adapter_model.safetensors", "adapter_config.json"], ["adapter_model.safetensors"]),
        (["original/consolidated.00.pth", "checkpoint-5/model.safetensors"], []),
        (["model.gguf", "tf_model.h5"], []),
    ],
)
def test_safetensors_before_pickles_and_no_copies(names: list[str], chosen: list[str]) -> None:
    assert torch_weights(names) == chosen
    assert pickles(chosen) == [name for name in chosen if not name.endswith(".safetensors")]


def test_an_onnx_model_brings_its_external_weights() -> None:
    names = ["onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_int8.onnx", "onnx/model.onnx.data"]
    assert onnx_weights(names) == ["onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx.data"]
    assert onnx_weights(["decoder.onnx"]) == ["decoder.onnx"]
    assert onnx_weights(["model.safetensors"]) == []
    with pytest.raises(ConfigError, match=r"several ONNX files \(a.onnx, b.onnx\)"):
        onnx_weights(["a.onnx", "b.onnx"])


def test_what_cannot_be_loaded_is_named() -> None:
    assert "``engine=onnx``" in reason_without_weights(["model.onnx"], onnx=False)
    assert "leave out ``engine=onnx``" in reason_without_weights(["model.safetensors"], onnx=True)
    assert "GGUF" in reason_without_weights(["model.gguf"], onnx=False)
    assert "holds no weights" in reason_without_weights(["config.json"], onnx=False)
