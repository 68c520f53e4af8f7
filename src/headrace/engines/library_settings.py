"""The settings that sentence-transformers and PyLate keep beside a model: each is obeyed, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.engines.model_config import ModelConfig, SentenceTransformersConfig
from headrace.errors import ConfigError
from headrace.records import Json

MODEL_FILE = "config_sentence_transformers.json"
_MODULES_FILE = "modules.json"
ENCODER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The files with the encoder's settings. The first that is there counts, as in sentence-transformers."""

WITHOUT_EFFECT = frozenset(
    {"__version__", "backend", "model_type", "requirements", "similarity_fn_name", "unpad_inputs"}
)
"""Settings that change no output."""
PROMPTS = frozenset({"default_prompt_name", "prompts"})
LOADING = frozenset(
    {
        *("config_args", "config_kwargs", "do_lower_case", "max_seq_length", "modality_config", "model_args"),
        *("model_kwargs", "module_output_name", "processing_kwargs", "processor_kwargs", "tokenizer_args"),
        *("tokenizer_name_or_path", "transformer_task"),
    }
)
"""Settings of the encoder, which sentence-transformers obeys when it loads it; `processing_of` reads one more."""
LATE_INTERACTION = frozenset(
    {
        *("attend_to_expansion_tokens", "attend_to_mask_tokens", "do_query_expansion", "document_length"),
        *("document_prefix", "query_expansion", "query_length", "query_prefix", "skiplist_words"),
    }
)
"""Settings of multi-vector models, also of those that PyLate has saved."""
_PLAIN = frozenset(
    {
        *("activation_fn", "max_seq_length", "modality_config", "module_output_name", "processing_kwargs"),
        "transformer_task",
    }
)
"""Settings that engines obey which load a model without sentence-transformers."""
_TASKS = frozenset({"feature-extraction", "sequence-classification"})
_FORWARD = frozenset({"last_hidden_state", "logits"})
_GROUPS = frozenset({"audio", "chat_template", "common", "image", "text", "video"})
_SAME_CALL: Mapping[str, tuple[object, ...]] = {
    "padding": (True, "longest"),
    "return_tensors": ("pt",),
    "truncation": (True, "longest_first"),
}
"""Arguments of a tokenizer, and the values with which Headrace gives the same tokens."""


@dataclass(frozen=True, slots=True)
class Processing:
    """How a model's texts are tokenized."""

    max_length: int | None = None
    """In tokens, instead of the tokenizer's own length; None if not set."""
    special_tokens: bool = True


def processing_of(folder: Path) -> Processing:
    """The `processing_kwargs` of a model's encoder. Raises ConfigError: one of them is not obeyed."""
    file, settings = _encoder_settings(folder)
    groups = settings.get("processing_kwargs") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise _refusal(file, "processing_kwargs", groups)
    for name in groups.keys() - _GROUPS:
        raise _refusal(file, f"processing_kwargs.{name}", groups[name])
    text = dict(groups.get("text", {}))
    max_length = text.pop("max_length", None)
    found = {**text, **groups.get("common", {})}  # in the order of sentence-transformers
    special = found.pop("add_special_tokens", True)
    for name, value in found.items():
        if value not in _SAME_CALL.get(name, ()):
            raise _refusal(file, f"processing_kwargs.{name}", value)
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise _refusal(file, "processing_kwargs.max_length", max_length)
    if type(special) is not bool:
        raise _refusal(file, "processing_kwargs.add_special_tokens", special)
    return Processing(max_length, special)


def check_settings(folder: Path, obeyed: frozenset[str]) -> None:
    """Check that an engine obeys all settings of a model's files.

    Args:
        obeyed: the settings that the engine obeys.

    Raises:
        ConfigError: one is not obeyed, and has a value.
    """
    for file, settings in ((folder / MODEL_FILE, read(folder / MODEL_FILE)), _encoder_settings(folder)):
        for name in settings.keys() - obeyed - WITHOUT_EFFECT:
            if settings[name]:
                raise _refusal(file, name, settings[name])
    file, settings = _encoder_settings(folder)
    if "message" in (settings.get("modality_config") or {}):
        raise _refusal(file, "modality_config.message", "a chat template around each text")


def _check_plain(file: Path, settings: Mapping[str, Json]) -> None:
    """Check that an encoder is a model of transformers as it is, called with tokens."""
    task = settings.get("transformer_task", "feature-extraction")
    if task not in _TASKS:
        raise _refusal(file, "transformer_task", task)
    ways = settings.get("modality_config") or {}
    if ways and (
        ways.keys() != {"text"}
        or ways["text"].get("method") != "forward"
        or ways["text"].get("method_output_name") not in _FORWARD
    ):
        raise _refusal(file, "modality_config", ways)


def with_own_settings(folder: Path, config: ModelConfig, *, prompted: bool = False) -> ModelConfig:
    """A model's config.json with the settings of sentence-transformers' own files, for engines that load without it.

    Args:
        prompted: whether the caller puts the model's prompts before texts.

    Raises:
        ConfigError: a setting is not obeyed, such as a prompt that the caller does not put before texts.
    """
    file, settings = _encoder_settings(folder)
    check_settings(folder, PROMPTS | _PLAIN)
    _check_plain(file, settings)
    told = read(folder / MODEL_FILE)
    prompt = (told.get("prompts") or {}).get(told.get("default_prompt_name"))
    if prompt and not prompted:
        raise ConfigError(f"the model in {folder} puts the prompt {prompt!r} before its texts, which is not supported")
    processing = processing_of(folder)
    own: SentenceTransformersConfig = {**(config.get("sentence_transformers") or {})}
    if activation := told.get("activation_fn"):
        own["activation_fn"] = activation
    if length := processing.max_length or settings.get("max_seq_length"):
        own["max_seq_length"] = length
    if not processing.special_tokens:
        own["special_tokens"] = False
    return {**config, "sentence_transformers": own}


def read(path: Path, empty: Json = None) -> Json:
    """The content of a JSON file; `empty` ({}) if it is missing or damaged. The loader reports a damaged file."""
    empty = {} if empty is None else empty
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return found if isinstance(found, type(empty)) else empty


def _encoder_settings(folder: Path) -> tuple[Path, dict[str, Json]]:
    """The file of the encoder's settings, in the folder of the first module, and its content."""
    steps: list[dict[str, Json]] = read(folder / _MODULES_FILE, [])
    place = folder / str(steps[0].get("path", "") if steps else "")
    files = [place / name for name in ENCODER_FILES]
    file = next((one for one in files if one.is_file()), files[0])
    return file, read(file)


def _refusal(file: Path, name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{file} sets {name} to {value!r:.80}, which this engine does not obey: remove it there if the model is right "
        "without it, or use a custom engine (``task=custom, engine=module:name``)"
    )
