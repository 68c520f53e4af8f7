"""Classify texts, score pairs and classify by custom labels, with sequence classification models on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headrace.engines.library_settings import with_own_settings
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import check_tokenizer, named_folder
from headrace.engines.model_kinds import use_instead
from headrace.engines.networks.heads import ChunkJoin
from headrace.engines.networks.pytorch import TorchNetwork, load_pretrained, loading
from headrace.engines.text.encoders import by_length, is_packed, tune
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.quantizing import Quantize, check_quantize, to_int8
from headrace.engines.text.splitting import LongTexts, TooLong, not_split
from headrace.engines.text.tasks import Candidates, ZeroShotEngine, classifier, scorer
from headrace.engines.text.tokenizing import tokens_for
from headrace.errors import EngineError


def classify(  # noqa: PLR0913 - one parameter per setting of the user
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize = None,
    enforce_eager: bool = False,
    max_model_len: int | None = None,
    on_too_long: TooLong = "truncate",
    chunk_overlap: int | None = None,
    chunk_join: ChunkJoin | None = None,
    top_labels: int | None = None,
) -> TextEngine:
    """Create a classifier of texts or text pairs.

    Args:
        model: the folder of a sequence classification model.
        device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the weights' dtype on CUDA; a job may choose, see docs/tuning.md), "float32",
            "float16" or "bfloat16".
        quantize: "int8" to multiply 8-bit integers in the encoder's linear layers (needs the extra quantize).
        enforce_eager: whether to do without CUDA graphs; without effect on a CPU.
        max_model_len: in tokens; None for the model's limit.
        on_too_long: truncate a longer text, fail its record, or split it into chunks.
        chunk_overlap: tokens that neighbouring chunks have in common; None for none.
        chunk_join: how the outputs for the chunks become one; None for the default of the task.
        top_labels: how many labels to list with their scores.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded, or the model is of another kind.
    """
    long_texts = LongTexts(on_too_long, chunk_overlap, chunk_join)
    network, tokenizer, config = _load(model, device, dtype, quantize, enforce_eager)
    return classifier(network, tokens_for(tokenizer, config, "either", max_model_len, long_texts), config, top_labels)


def score(  # noqa: PLR0913 - as above
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize = None,
    enforce_eager: bool = False,
    max_model_len: int | None = None,
    on_too_long: TooLong = "truncate",
    chunk_overlap: int | None = None,
    chunk_join: ChunkJoin | None = None,
) -> TextEngine:
    """Create a cross-encoder: one score per text pair. Parameters and errors as `classify`."""
    long_texts = LongTexts(on_too_long, chunk_overlap, chunk_join)
    network, tokenizer, config = _load(model, device, dtype, quantize, enforce_eager)
    return scorer(network, tokens_for(tokenizer, config, "pair", max_model_len, long_texts), config)


def zero_shot(  # noqa: PLR0913 - one parameter per setting of the user
    model: str | Path | None = None,
    *,
    labels: str | Sequence[str] = (),
    hypothesis_template: str = "This example is {}.",
    multi_label: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    quantize: Quantize = None,
    enforce_eager: bool = False,
    max_model_len: int | None = None,
    on_too_long: TooLong = "truncate",
) -> ZeroShotEngine:
    """Create a classifier by custom labels, with a natural language inference model.

    Args:
        labels: the candidate labels; a string is split at commas.
        hypothesis_template: the sentence for a label.
        multi_label: whether several labels may apply at once.

    Other parameters and errors as `classify`.
    """
    candidates = Candidates(labels, hypothesis_template, multi_label)
    network, tokenizer, config = _load(model, device, dtype, quantize, enforce_eager)
    tokens = tokens_for(tokenizer, config, "premise", max_model_len, not_split(on_too_long))
    return ZeroShotEngine(network, tokens, candidates, config)


def _load(
    model: str | Path | None, device: str, dtype: str, quantize: Quantize, enforce_eager: bool
) -> tuple[TorchNetwork, PreTrainedTokenizerBase, ModelConfig]:
    """The network, its tokenizer and its config.json."""
    folder = named_folder(model)
    check_tokenizer(folder)
    int8 = check_quantize(quantize, dtype)
    module, place, missing = load_pretrained(AutoModelForSequenceClassification, folder, device, dtype)
    if missing:
        raise EngineError(
            f"the model in {folder} is not a sequence classifier: its weights lack {', '.join(sorted(missing)[:3])} "
            f"(it says it is a {', '.join(module.config.architectures or ['model of an unknown kind'])})"
            + use_instead(folder)
        )
    _give_padding(module)
    tune(module)
    if int8:
        to_int8(module)
    with loading(folder, weights=False):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    inputs = frozenset(tokenizer.model_input_names) | {"input_ids", "attention_mask"}
    network = TorchNetwork(folder, module, place, partial(_logits, module), inputs, by_length(module))
    network.allow_graphs(enforce_eager)
    if is_packed(module):
        network.allow_parts()
    return network, tokenizer, with_own_settings(folder, module.config.to_dict())


def _give_padding(module: PreTrainedModel) -> None:
    """Add a padding token to the table of a decoder that has none: it reads a text's last token that is no padding.

    No text has the new token, so it cannot be taken for the end of one.
    """
    config = module.config.get_text_config()
    if config.pad_token_id is None and config.vocab_size is not None:
        pad = module.get_input_embeddings().num_embeddings
        module.resize_token_embeddings(pad + 1, mean_resizing=False)
        module.config.pad_token_id = config.pad_token_id = pad


def _logits(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    logits: torch.Tensor = module(**tensors).logits
    return logits
