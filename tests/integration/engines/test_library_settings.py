"""Every setting in the files of sentence-transformers is obeyed as by itself, or refused by name."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import sentence_transformers
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Module, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling
from sentence_transformers.util import fullname
from tests.families import change, colbert, family_model
from tests.integration.conftest import save_sentence_model
from tests.small_models import text_model
from transformers import ReformerConfig, ReformerModel
from transformers.processing_utils import TextKwargs

from headrace.engines import library_settings
from headrace.engines.base import PromptedText
from headrace.engines.choosing.registry import create
from headrace.engines.library_settings import LATE_INTERACTION, LOADING, PROMPTS, WITHOUT_EFFECT, with_own_settings
from headrace.engines.text import modules
from headrace.engines.text.exported_pooling import pooling_of
from headrace.errors import ConfigError, EngineError

TEXTS = ["The Canal feeds the mill wheel, so that it never runs dry", "a", "turns", "Wheel. " * 12]
PAIRS = [(TEXTS[0], TEXTS[2]), (TEXTS[3], TEXTS[0]), ("a", "b")]
ENCODER, MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"


def text(**arguments: Any) -> dict[str, Any]:
    return {"processing_kwargs": {"text": arguments}}


def outputs(engine: Any, inputs: list[Any]) -> Any:
    return engine.forward([one.payload for one in engine.prepare(inputs)])


def vectors(folder: Path, **options: Any) -> NDArray[np.float32]:
    return np.stack(outputs(create("embed", folder, device="cpu", **options), TEXTS))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer tells capital letters from small ones."""
    folder = save_sentence_model(tmp_path_factory.mktemp("made"), prompts={"topic": "about: "})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(folder, "tokenizer_config.json", do_lower_case=False)
    return folder


@pytest.fixture
def dense(made: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.mark.parametrize(
    ("file", "settings", "differs"),
    [
        (ENCODER, text(add_special_tokens=False), True),
        (ENCODER, text(max_length=6), True),
        (ENCODER, text(max_length=6, add_special_tokens=False), True),
        (ENCODER, {"processing_kwargs": {"common": {"add_special_tokens": False}}}, True),
        (ENCODER, text(padding="longest", truncation=True), False),
        (ENCODER, {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}, "image": {"a": 1}}}, False),
        (ENCODER, text(max_length=30) | {"max_seq_length": 6}, False),
        (ENCODER, {"max_seq_length": 6}, True),
        (ENCODER, {"do_lower_case": True}, True),
        (ENCODER, {"processor_kwargs": {"model_max_length": 6, "truncation_side": "left"}}, True),
        (ENCODER, {"tokenizer_args": {"model_max_length": 6}}, True),
        (ENCODER, {"model_args": {"attn_implementation": "eager"}, "unpad_inputs": False}, False),
        (ENCODER, {"config_kwargs": {"hidden_act": "relu"}}, True),
        (MODEL, {"truncate_dim": 5, "similarity_fn_name": "dot"}, True),
        (MODEL, {"default_prompt_name": "topic"}, True),
        ("1_Pooling/config.json", {"embedding_dimension": 4}, False),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "max"]}, True),
    ],
    ids=str,
)
def test_an_embedding_obeys_a_setting_as_sentence_transformers_does(
    dense: Path, file: str, settings: dict[str, Any], differs: bool
) -> None:
    without = vectors(dense)
    np.testing.assert_allclose(without, SentenceTransformer(str(dense), device="cpu").encode(TEXTS), atol=1e-5)
    change(dense, file, **settings)
    found = vectors(dense)
    np.testing.assert_allclose(found, SentenceTransformer(str(dense), device="cpu").encode(TEXTS), atol=1e-5)
    assert (found.shape != without.shape or float(np.abs(found - without).max()) > 0.001) is differs


def test_the_settings_of_an_encoder_have_older_names_and_places(dense: Path) -> None:
    change(dense, ENCODER, **text(max_length=5))
    expected = vectors(dense)
    (dense / ENCODER).rename(dense / "sentence_xlnet_config.json")
    np.testing.assert_array_equal(vectors(dense), expected)
    place = dense / "0_Transformer"
    place.mkdir()
    for file in list(dense.iterdir()):
        if file.is_file() and file.name not in ("modules.json", MODEL):
            file.rename(place / file.name)
    steps = json.loads((dense / "modules.json").read_text())
    steps[0]["path"] = place.name
    (dense / "modules.json").write_text(json.dumps(steps))
    np.testing.assert_allclose(vectors(dense), expected, atol=1e-6)


def test_layers_may_be_weighted(tmp_path: Path) -> None:
    encoder = Transformer(str(family_model(tmp_path / "plain", "Bert", output_hidden_states=True)))
    parts = [encoder, WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), Pooling(32)]
    reference = SentenceTransformer(modules=parts, device="cpu")
    reference.save(str(tmp_path / "model"))
    np.testing.assert_allclose(vectors(tmp_path / "model"), reference.encode(TEXTS), atol=1e-5)


def test_a_model_gives_all_its_components_whatever_its_files_declare(tmp_path: Path) -> None:
    """A Reformer has two streams, and its config.json says how wide one is."""
    folder = text_model(tmp_path, head=False)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32}
    places = {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (4, 12), "max_position_embeddings": 128}
    layers = {"attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "is_decoder": False}
    ReformerModel(ReformerConfig(vocab_size=30_522, **sizes, **places, **layers)).save_pretrained(folder)
    found, expected = vectors(folder), SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.shape[1] == 2 * json.loads((folder / "config.json").read_text())["hidden_size"]
    assert create("embed", folder, device="cpu").profile.dimension == found.shape[1]


@pytest.mark.parametrize(
    "settings", [{}, text(max_length=7), text(add_special_tokens=False), {"max_seq_length": 7}], ids=str
)
def test_scores_of_pairs_obey_the_settings_of_a_cross_encoder(tmp_path: Path, settings: dict[str, Any]) -> None:
    CrossEncoder(str(text_model(tmp_path / "plain", ["score"])), device="cpu").save(str(tmp_path / "model"))
    change(tmp_path / "model", ENCODER, **settings)
    expected = CrossEncoder(str(tmp_path / "model"), device="cpu").predict(PAIRS)
    found = outputs(create("score", tmp_path / "model", device="cpu"), PAIRS)
    assert found == pytest.approx([float(score) for score in expected], abs=1e-5)


@pytest.mark.parametrize("strategy", ["fixed", "min"])
@pytest.mark.parametrize(
    "settings", [text(max_length=14), text(add_special_tokens=False), {"document_length": 9}], ids=str
)
def test_queries_and_documents_obey_them(tmp_path: Path, settings: dict[str, Any], strategy: str) -> None:
    folder = colbert(tmp_path / "model", strategy=strategy)
    change(folder, ENCODER, **settings)
    reference = MultiVectorEncoder(str(folder), device="cpu")
    engine = create("multi-vector-embed", folder, device="cpu")
    found = outputs(engine, [*TEXTS, *(PromptedText(one, "query") for one in TEXTS)])
    expected = [*reference.encode_document(TEXTS), *reference.encode_query(TEXTS)]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", sorted(TextKwargs.__annotations__.keys() - {"max_length", "add_special_tokens"}))
def test_other_arguments_of_a_tokenizer_are_refused_by_name(dense: Path, name: str) -> None:
    change(dense, ENCODER, **text(**{name: "odd"}))
    with pytest.raises(ConfigError, match=rf"{ENCODER} sets processing_kwargs.{name} to 'odd', which .* does not obey"):
        create("embed", dense, device="cpu")


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        (ENCODER, {"processing_kwargs": {"max_length": 6}}, r"processing_kwargs to \{'max_length': 6\}"),
        (ENCODER, {"processing_kwargs": {"common": {"max_length": 6}}}, "processing_kwargs.max_length to 6"),
        (ENCODER, {"processing_kwargs": ["text"]}, r"processing_kwargs to \['text'\]"),
        (ENCODER, text(max_length="6"), "processing_kwargs.max_length to '6'"),
        (ENCODER, text(add_special_tokens=0), "processing_kwargs.add_special_tokens to 0"),
        (ENCODER, {"query_length": 9}, "query_length to 9"),
        (ENCODER, {"a_later_version": 7}, "a_later_version to 7"),
        (ENCODER, {"modality_config": {"message": {}}}, "modality_config.message to 'a chat template"),
        (MODEL, {"max_active_dims": 9}, "max_active_dims to 9"),
        (MODEL, {"a_later_version": True}, "a_later_version to True"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_obeyed_is_refused_by_name(
    dense: Path, file: str, settings: dict[str, Any], named: str
) -> None:
    change(dense, file, **settings)
    with pytest.raises(ConfigError, match=rf"{file} sets {named}.* does not obey: remove it there"):
        create("embed", dense, device="cpu")


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        (MODEL, {"truncate_dim": 5}),
        (MODEL, {"keep_in_fp32_modules": ["0.model.classifier"]}),
        (ENCODER, {"do_lower_case": True}),
        (ENCODER, {"processor_kwargs": {"truncation_side": "left"}}),
        (ENCODER, {"transformer_task": "text-generation"}),
        (ENCODER, {"modality_config": {"text": {"method": "get_text_features", "method_output_name": "x"}}}),
    ],
    ids=str,
)
def test_engines_that_load_a_model_themselves_refuse_what_they_do_not_read(
    tmp_path: Path, file: str, settings: dict[str, Any]
) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"{file} sets {next(iter(settings))} "):
        with_own_settings(tmp_path, {})


@pytest.mark.parametrize(
    ("steps", "config", "named"),
    [
        (("Normalize", "Dense"), {}, "modules Transformer, Pooling, Normalize, Dense, in an order that it does not"),
        (("Dense",), {"use_residual": True}, "module Dense with use_residual True, which it does not compute"),
        (("Normalize",), {"module_input_name": "token_embeddings"}, "Normalize with module_input_name 'token_embed"),
        (("LayerNorm",), {}, "module LayerNorm, which it does not compute"),
    ],
)
def test_other_runtimes_compute_modules_in_their_usual_order_and_way_or_refuse_them(
    tmp_path: Path, steps: tuple[str, ...], config: dict[str, Any], named: str
) -> None:
    kinds = ["Transformer", "Pooling", *steps]
    listed = [{"path": f"{place}_{kind}" if place else "", "type": f"st.{kind}"} for place, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / listed[-1]["path"]).mkdir()
    (tmp_path / listed[-1]["path"] / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=named):
        pooling_of(tmp_path, ("mean", "cls"), "it", dense=True)


class Reads(dict[str, Any]):
    """Settings that note which of them are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return False


KNOWN = WITHOUT_EFFECT | PROMPTS | LATE_INTERACTION | {"truncate_dim", "max_active_dims", "activation_fn"}
REFUSED = {"keep_in_fp32_modules"}


@pytest.mark.parametrize("kind", [SentenceTransformer, SparseEncoder, MultiVectorEncoder, CrossEncoder])
def test_all_settings_are_known_that_the_library_reads_and_writes_for_a_model(kind: Any, tmp_path: Path) -> None:
    model = kind(str(text_model(tmp_path, ["score"], head=kind is CrossEncoder)), device="cpu")
    read = Reads()
    model._parse_model_config(read)
    for name in ("truncate_dim", "max_active_dims"):
        if hasattr(model, name):
            setattr(model, name, 9)
    if kind is CrossEncoder:
        model.keep_in_fp32_modules = ["0.model.classifier"]
    written = set(model._get_model_config())
    assert "prompts" in written & read.names
    assert written | read.names <= KNOWN | REFUSED


def test_all_settings_are_known_that_the_library_has_for_an_encoder() -> None:
    arguments = set(inspect.signature(Transformer.__init__).parameters) - {"self", "model_name_or_path"}
    assert arguments | set(Transformer.config_keys) <= LOADING | LATE_INTERACTION | WITHOUT_EFFECT
    assert set(Transformer._VALID_PROCESSING_KWARGS_KEYS) == library_settings._GROUPS
    source = inspect.getsource(Transformer.load_config)
    assert [name for name in library_settings.ENCODER_FILES if f'"{name}"' in source] == list(
        library_settings.ENCODER_FILES
    )
    assert source.count("_config.json") == len(library_settings.ENCODER_FILES)
    assert {*get_type_hints(TextKwargs)} > {*library_settings._SAME_CALL, "max_length", "add_special_tokens"} - {
        "return_tensors"
    }


RUN: Mapping[str, set[str]] = {
    "Dense": {
        *("in_features", "out_features", "bias", "activation_function", "init_weight", "init_bias"),
        *("module_input_name", "module_output_name", "use_residual"),
    },
    "Dropout": {"dropout"},
    "LayerNorm": {"dimension"},
    "MLMTransformer": set(),
    "MultiVectorMask": {"skiplist_words", "skiplist_tasks", "keep_only_token_ids"},
    "Normalize": {"module_input_name", "module_output_name"},
    "Pooling": {"embedding_dimension", "pooling_mode", "include_prompt"},
    "SparseAutoEncoder": {"input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold"},
    "SparseStaticEmbedding": {"frozen", "tokenizer", "weight"},
    "SpladePooling": {"pooling_strategy", "activation_function", "embedding_dimension", "chunk_size"},
    "StaticEmbedding": {"tokenizer", "embedding_weights", "embedding_dim"},
    "WeightedLayerPooling": {"embedding_dimension", "num_hidden_layers", "layer_start", "layer_weights"},
}
"""Modules that run as sentence-transformers loads them, by the settings that they have."""
ELSEWHERE = {"Transformer", "Module", "InputModule"}
BY_TASK = {"CLIPModel", "LogitScore", "BaseTokenPooling", "HierarchicalTokenPooling", "LambdaTokenPooling"}
"""Refused by their kind or by the task for multi-vector models."""


def library_modules() -> dict[str, Any]:
    places = pkgutil.walk_packages(sentence_transformers.__path__, "sentence_transformers.")
    found = [vars(importlib.import_module(one.name)) for one in places if ".modules" in one.name]
    return {
        name: value
        for names in found
        for name, value in names.items()
        if inspect.isclass(value) and issubclass(value, Module) and value.__module__.startswith("sentence_transformers")
    }


def test_every_module_of_the_library_is_run_or_refused_and_its_settings_are_known() -> None:
    found = library_modules()
    assert found.keys() == RUN.keys() | ELSEWHERE | BY_TASK | modules._UNSUPPORTED
    for name, settings in RUN.items():
        if name == "MLMTransformer":
            continue  # an older name of Transformer
        arguments = {
            one.name
            for one in inspect.signature(found[name].__init__).parameters.values()
            if one.name != "self" and one.kind is not one.VAR_KEYWORD
        }
        assert arguments | set(found[name].config_keys) == settings, fullname(found[name])


def test_a_module_that_is_not_run_is_refused_by_name(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import CNN

    encoder = Transformer(str(family_model(tmp_path / "plain", "Bert")))
    SentenceTransformer(modules=[encoder, CNN(32, 8), Pooling(24)], device="cpu").save(str(tmp_path / "model"))
    with pytest.raises(EngineError, match="has the module CNN of sentence-transformers, which is not supported"):
        create("embed", tmp_path / "model", device="cpu")
