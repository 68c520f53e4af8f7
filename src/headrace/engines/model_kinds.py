"""Detect the kind of a model from the JSON files in its folder, and check that the kind fits the task."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from headrace.engines.library_settings import MODEL_FILE, read
from headrace.engines.model_config import ModelConfig
from headrace.engines.tasks import task_named
from headrace.errors import ConfigError

logger = logging.getLogger("headrace")

_OWN_ENGINE = "no task supports it; use a custom engine (``task=custom, engine=module:name``)"

_KINDS: Mapping[str, tuple[str, str]] = {
    "classifier": ("a classifier of texts", "use the task classify"),
    "cross-encoder": ("a cross-encoder, which scores pairs of texts", "use the task score"),
    "tagger": ("a token classifier", _OWN_ENGINE),
    "reader": ("a question answering model", _OWN_ENGINE),
    "chooser": ("a multiple choice model", _OWN_ENGINE),
    "speech": ("a speech model", _OWN_ENGINE),
    "image classifier": ("an image classifier", "use the task image-classify or image-embed"),
    "vision": ("an image model", "use the task image-embed"),
    "decoder": ("a language model", "use the task generate"),
    "encoder-decoder": ("an encoder-decoder model", _OWN_ENGINE),
    "masked": ("a masked language model", "use the task embed"),
    "bare": ("a network without a head", "use the task embed, or a folder with the trained head"),
    "dense": ("an embedding model of sentence-transformers", "use the task embed"),
    "sparse": (
        "a sparse (SPLADE) encoder, which gives a weight per word and not a dense vector",
        "use the task sparse-embed",
    ),
    "multi-vector": (
        "a multi-vector (ColBERT) encoder, which gives a vector per token",
        "use the task multi-vector-embed",
    ),
    "static": ("a model of static embeddings", "use the task embed"),
    "words": ("a table of word vectors, without files of sentence-transformers for its use", _OWN_ENGINE),
    "clip": ("a CLIP model of sentence-transformers", "use the task image-embed with the transformers folder in it"),
    "logit scorer": ("a reranker that reads its score from a language model's logits", _OWN_ENGINE),
}
"""Each kind: its description, and what to do instead."""

_TEXT_LABELS = frozenset({"classifier", "cross-encoder"})

_PARTS = frozenset({"text_config", "vision_config", "audio_config"})
"""Fields of multimodal models; a model for conditional generation without them is an encoder-decoder."""

_SPEECH = (
    "Whisper",
    "Wav2Vec2",
    "Hubert",
    "WavLM",
    "Speech",
    "Seamless",
    "Moonshine",
    "UniSpeech",
    "SEW",
    "Data2VecAudio",
)
_ENDINGS = (
    ("ForSequenceClassification", "classifier"),
    ("ForTokenClassification", "tagger"),
    ("ForQuestionAnswering", "reader"),
    ("ForMultipleChoice", "chooser"),
    ("ForNextSentencePrediction", "classifier"),
    ("ForImageClassification", "image classifier"),
    ("ForImageClassificationWithTeacher", "image classifier"),
    ("ForCTC", "speech"),
    ("ForAudioClassification", "speech"),
    ("ForCausalLM", "decoder"),
    ("LMHeadModel", "decoder"),
    ("ForMaskedLM", "masked"),
    ("ForPreTraining", "masked"),
    ("Model", "bare"),
)
"""Suffixes of transformers' class names."""

_MODULES = (
    ("SpladePooling", "sparse"),
    ("MLMTransformer", "sparse"),
    ("SparseAutoEncoder", "sparse"),
    ("SparseStaticEmbedding", "sparse"),
    ("MultiVectorMask", "multi-vector"),
    ("LogitScore", "logit scorer"),
    ("StaticEmbedding", "static"),
    ("WordEmbeddings", "words"),
    ("BoW", "words"),
    ("CLIPModel", "clip"),
)
"""Layers of sentence-transformers that determine the kind of a model."""

_SENTENCE_TRANSFORMERS = {
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",
    "CrossEncoder": "cross-encoder",
}


def check_kind(task: str, model: str | Path | None, named: str = "") -> None:
    """Check that the model's files do not name a kind that the task cannot use.

    A model without such files, such as a name that is not a local folder, is not checked.

    Args:
        named: the model in the message; empty for the folder.

    Raises:
        ConfigError: the model is of another kind; the message says what to use instead.
    """
    folder = Path(model or "").expanduser()
    suits = task_named(task).suits
    if model is None or suits is None or not any((folder / name).is_file() for name in ("config.json", _STEPS)):
        return
    kind, sign = _kind(folder)
    if kind is None or kind in suits:
        return
    name, way_out = _KINDS[kind]
    whose = f"model {named!r}" if named else f"the model in {folder}"
    raise ConfigError(f"{whose} is {name} ({sign}), which the task {task} cannot use; {way_out}")


def use_instead(folder: Path) -> str:
    """What a model can be used for, as the end of a sentence; empty if its files do not say it."""
    kind, _ = _kind(folder)
    return "" if kind is None or kind in _TEXT_LABELS else f"; {_KINDS[kind][1]}"


def warn_unused_head(task: str, model: str | Path | None) -> None:
    """Warn if a masked language model is used without its head: it may be a sparse encoder."""
    folder = Path(model or "").expanduser()
    if model is None or task_named(task).outputs != "vector" or not (folder / "config.json").is_file():
        return
    kind, sign = _kind(folder)
    if kind == "masked":
        logger.warning(
            "headrace: the model in %s is a masked language model (%s) without files of sentence-transformers: its "
            "head is not used, and a text's vector is the mean of its token vectors. A sparse (SPLADE) model needs "
            "its head: use the task sparse-embed",
            folder,
            sign,
        )


_STEPS = "modules.json"


def _kind(folder: Path) -> tuple[str | None, str]:
    """The kind of the model, None if unknown, and the field or file that says so."""
    told = str(read(folder / MODEL_FILE).get("model_type"))
    types = [str(step.get("type")) for step in read(folder / _STEPS, [])]
    for name, kind in _MODULES:
        if any(kind_of.rpartition(".")[2] == name for kind_of in types):
            return kind, f"{name} in {_STEPS}"
    if any(kind_of.startswith("pylate.") for kind_of in types):
        return "multi-vector", f"pylate in {_STEPS}"
    if told in _SENTENCE_TRANSFORMERS:
        return _SENTENCE_TRANSFORMERS[told], f"model_type {told} in {MODEL_FILE}"
    if types:
        return "dense", _STEPS
    return _transformers_kind(folder, read(folder / "config.json"))


def _transformers_kind(folder: Path, config: ModelConfig) -> tuple[str | None, str]:
    architectures: list[str] = config.get("architectures") or [""]
    name = architectures[0]
    if "colbert" in name.lower():
        return "multi-vector", name
    if name == "StaticModel" or config.get("model_type") == "model2vec":
        return "words", name or "model2vec"
    if name.startswith(_SPEECH):
        return "speech", name
    kind = next((kind for ending, kind in _ENDINGS if name.endswith(ending)), None)
    if kind == "masked" and (sign := _named_splade(folder, config)):
        return "sparse", f"{name}, {sign}"
    if kind == "classifier" and len(config.get("id2label") or {}) == 1:
        return "cross-encoder", name
    if kind not in (None, "bare"):
        return kind, name
    if config.get("is_encoder_decoder") or (name.endswith("ForConditionalGeneration") and not _PARTS & config.keys()):
        return "encoder-decoder", name or "is_encoder_decoder in config.json"
    return _of_images(folder, config, name) if kind is None or _reads_images(folder) else (kind, name)


def _named_splade(folder: Path, config: ModelConfig) -> str:
    """Where the name of a masked language model contains SPLADE, the only sign of one in a plain folder; else ""."""
    place = folder.resolve()
    if place.parent.name == "snapshots":  # the hub's cache: models--org--name/snapshots/commit
        place = place.parent.parent
    names = {"its folder's name": place.name, "_name_or_path in config.json": config.get("_name_or_path")}
    return next((place for place, name in names.items() if "splade" in str(name).lower()), "")


def _of_images(folder: Path, config: ModelConfig, name: str) -> tuple[str | None, str]:
    """The kind of a model that may take images."""
    texts = any(path.name.startswith(("token", "vocab")) or path.suffix == ".model" for path in folder.iterdir())
    if _reads_images(folder) and not texts:
        return "vision", name or "a preprocessor_config.json and no tokenizer"
    return ("vision" if name.endswith("Model") and "vision_config" in config else None), name


def _reads_images(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
