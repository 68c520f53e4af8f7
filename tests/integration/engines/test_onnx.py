"""ONNX models give what PyTorch gives, without PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from scripts.export_onnx import Positional, export
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tests.families import change
from tests.small_models import encoded, picture, text_model, vision_model

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.errors import ConfigError, EngineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.onnx", "ignore::FutureWarning:copyreg")
ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["", "a", "the canal feeds the wheel", "so that it never runs dry " * 12]


def outputs(engine: Any, inputs: Sequence[Any]) -> list[Any]:
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return list(engine.forward([one.payload for one in ready]))


def test_token_states_are_pooled_as_a_sentence_transformers_folder_says(tmp_path: Path) -> None:
    """The usual layout: the network alone is ONNX, in a folder `onnx`, and its pooling is beside it."""
    import torch
    from transformers import BertConfig, BertModel

    inner = text_model(tmp_path / "inner")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, vocab_size=30_522, initializer_range=0.3)).save_pretrained(inner)
    encoder = Transformer(str(inner))

    class Network:
        module = encoder.auto_model.eval()

        @staticmethod
        def call(tensors: Any) -> Any:
            return Network.module(**tensors).last_hidden_state

    names = ["input_ids", "attention_mask"]
    rows, tokens = torch.export.Dim("rows", min=1, max=999), torch.export.Dim("tokens", min=2, max=999)
    torch.onnx.export(
        Positional(Network, names).eval(),
        (torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)),
        tmp_path / "model.onnx",
        dynamo=True,
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes=(tuple({0: rows, 1: tokens} for _ in names),),
        external_data=False,
        verbose=False,
    )
    for pooling in ("mean", "cls", "max"):
        model = SentenceTransformer(modules=[encoder, Pooling(32, pooling), Normalize()], device="cpu")
        model.max_seq_length = 24
        folder = tmp_path / pooling
        model.save(str(folder))
        (folder / "onnx").mkdir()
        shutil.copy(tmp_path / "model.onnx", folder / "onnx")
        engine = create("embed", folder, engine="onnx")
        assert engine.profile.max_model_len == 24
        assert np.abs(np.array(outputs(engine, TEXTS)) - model.encode(TEXTS)).max() < 1e-5


def test_what_is_no_onnx_model_says_so(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no weights \(\*\.onnx\)"):
        create("classify", folder, engine="onnx")
    (folder / "model.onnx").write_bytes(b"no protobuf")
    with pytest.raises(EngineError, match=r"model\.onnx cannot be loaded"):
        create("classify", folder, engine="onnx")
    with pytest.raises(ConfigError, match=r"no execution provider 'ToasterExecutionProvider'; available: .*CPU"):
        create("classify", folder, engine="onnx", providers=["ToasterExecutionProvider"])
    (folder / "model.onnx").rename(folder / "one.onnx")
    (folder / "two.onnx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several ONNX files \(one\.onnx, two\.onnx\)"):
        create("classify", folder, engine="onnx")
    with pytest.raises(ConfigError, match="has no default model"):
        create("embed", engine="onnx")


def test_layers_outside_the_onnx_file_are_refused_by_name(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / "model.onnx").write_bytes(b"")
    modules = [{"idx": 0, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(EngineError, match="has the module Dense, which the engine onnx does not compute; export"):
        create("embed", folder, engine="onnx")


PAIRS = [("a", "b"), (TEXTS[2], TEXTS[3]), (TEXTS[3], TEXTS[3]), ("", TEXTS[2])]
IMAGES = [encoded(picture(*size, seed=sum(size))) for size in ((40, 30), (31, 64), (200, 33), (1, 1))]
IMAGES.append(encoded(picture(40, 30).quantize(16), transparency=bytes(range(0, 256, 17))))


def numbers(output: Any) -> Any:
    return [output["score"], *output["scores"]] if isinstance(output, dict) else output


@pytest.mark.parametrize(
    ("task", "make", "inputs", "options"),
    [
        pytest.param(
            "classify",
            lambda folder: text_model(folder, ["x", "y", "z"]),
            [*TEXTS, *PAIRS],
            {"top_labels": 3},
            id="labels",
        ),
        pytest.param(
            "classify",
            lambda folder: text_model(folder, ["x", "y"], problem_type="multi_label_classification"),
            TEXTS,
            {"top_labels": 2, "max_model_len": 9},
            id="several labels",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "score",
            lambda folder: text_model(folder, ["s"], sentence_transformers={"activation_fn": "Identity"}),
            PAIRS,
            {},
            id="scores",
        ),
        pytest.param(
            "zero-shot",
            lambda folder: text_model(folder, ["entailment", "other"]),
            TEXTS,
            {"labels": ["one", "two"]},
            id="zero-shot",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "image-classify", vision_model, IMAGES, {"top_labels": 3}, id="image labels", marks=pytest.mark.thorough
        ),
        pytest.param("image-embed", lambda folder: vision_model(folder, "clip"), IMAGES, {}, id="image vectors"),
        pytest.param(
            "image-embed",
            lambda folder: vision_model(folder, "resnet"),
            IMAGES,
            {},
            id="pooled places",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_exported_model_gives_what_pytorch_gives(
    tmp_path: Path, task: str, make: Any, inputs: list[Any], options: dict[str, Any]
) -> None:
    folder = make(tmp_path / "model")
    export(str(folder), tmp_path / "exported", task)
    expected = outputs(create(task, folder, device="cpu", **options), inputs)
    engine = create(task, tmp_path / "exported", engine="onnx", **options)
    together, alone = outputs(engine, inputs), [outputs(engine, [one])[0] for one in inputs]
    for found in (together, alone):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=1e-4)
            assert not isinstance(ours, dict) or ours.get("labels") == theirs.get("labels")


def graph(folder: Path, nodes: list[Any], output: list[Any], **inputs: int) -> Path:
    """Write a model with these inputs, by their types, to a folder of a model of images; returns the folder."""
    vision_model(folder)
    given = [helper.make_tensor_value_info(name, kind, ["n", 3, 32, 32]) for name, kind in inputs.items()]
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [0, 3, -1])
    made = helper.make_graph(nodes, "made", given, [helper.make_tensor_value_info(*output)], [shape])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
    return folder


STATES = [
    helper.make_node("Reshape", ["pixel_values", "shape"], ["flat"]),
    helper.make_node("Transpose", ["flat"], ["last_hidden_state"], perm=[0, 2, 1]),
]


def test_an_image_s_vector_is_that_of_its_first_token_or_the_mean_of_its_places(tmp_path: Path) -> None:
    """As the PyTorch engine makes it of a model without pooling. The pixels themselves stand for states."""
    tokens = graph(
        tmp_path / "tokens",
        STATES,
        ["last_hidden_state", TensorProto.FLOAT, ["n", "tokens", 3]],
        pixel_values=TensorProto.FLOAT,
    )
    places = graph(
        tmp_path / "places",
        [helper.make_node("Cast", ["pixel_values"], ["feature_maps"], to=TensorProto.FLOAT)],
        ["feature_maps", TensorProto.FLOAT, ["n", 3, 32, 32]],
        pixel_values=TensorProto.FLOAT16,
    )
    for folder in (tokens, places):
        engine = create("image-embed", folder, engine="onnx")
        pixels = np.stack([one.payload for one in engine.prepare(IMAGES)])
        expected = pixels[:, :, 0, 0] if folder is tokens else pixels.mean(axis=(2, 3))
        np.testing.assert_allclose(outputs(engine, IMAGES), expected, atol=2e-3)


def test_a_model_with_other_inputs_or_another_number_of_outputs_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    output = ["feature_maps", TensorProto.FLOAT, ["n", 3, 32, 32]]
    nodes = [helper.make_node("Add", ["pixel_values", "more"], ["feature_maps"])]
    both = graph(tmp_path / "both", nodes, output, pixel_values=TensorProto.FLOAT, more=TensorProto.FLOAT)
    with pytest.raises(
        EngineError, match=r"takes more, pixel_values and fails on the pixel_values of an image: .*more"
    ):
        create("image-embed", both, engine="onnx")
    nodes = [helper.make_node("ReduceMean", ["pixel_values"], ["logits"], axes=[2, 3], keepdims=0)]
    logits = graph(tmp_path / "logits", nodes, ["logits", TensorProto.FLOAT, ["n", 3]], pixel_values=TensorProto.FLOAT)
    assert len(outputs(create("image-classify", logits, engine="onnx", top_labels=3), IMAGES)) == len(IMAGES)
    change(logits, id2label={"0": "one", "1": "two"})
    with pytest.raises(EngineError, match=r"gives 3 outputs, and its config.json names 2 labels \(one, two\)"):
        create("image-classify", logits, engine="onnx")


def test_labels_of_another_model_are_refused_when_it_is_loaded(tmp_path: Path) -> None:
    export(str(text_model(tmp_path / "model", ["x", "y", "z"])), tmp_path / "exported", "classify")
    change(tmp_path / "exported", id2label={"0": "x", "1": "y"})
    with pytest.raises(EngineError, match=r"gives 3 outputs, and its config\.json names 2 labels"):
        create("classify", tmp_path / "exported", engine="onnx")
    change(tmp_path / "exported", id2label={"0": "x"})
    with pytest.raises(EngineError, match=r"gives 3 outputs, and its config\.json names 1 labels"):
        create("score", tmp_path / "exported", engine="onnx")
    change(tmp_path / "exported", id2label={"0": "entailment", "1": "other"})
    with pytest.raises(EngineError, match=r"gives 3 outputs, and its config\.json names 2 labels"):
        create("zero-shot", tmp_path / "exported", engine="onnx", labels=["one"])
