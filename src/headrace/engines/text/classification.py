"""Classify texts, score pairs and classify by custom labels, with sequence classification models on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from headrace.engines.library_settings import with_own_settings
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import check_tokenizer, find_folder
from headrace.engines.model_kinds import use_instead
from headrace.engines.networks import packing
from headrace.engines.networks.files import load_tokenizer
from headrace.engines.networks.pytorch import TorchNetwork, load_pretrained
from headrace.engines.text.encoders import by_length, takes_threads, tune
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.options import Classification, Scoring, SequenceClassifierOptions, ZeroShot
from headrace.engines.text.quantizing import check_quantize, to_int8
from headrace.engines.text.sequence_classifiers import Candidates, ZeroShotEngine, classifier, scorer
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.tokenizing import Takes, TextTokens, tokens_for
from headrace.errors import EngineError


def classify(options: Classification) -> TextEngine:
    return classifier(*_load(options, "either", LongTexts.of(options)), options.top_labels)


def score(options: Scoring) -> TextEngine:
    return scorer(*_load(options, "pair", LongTexts.of(options)))


def zero_shot(options: ZeroShot) -> ZeroShotEngine:
    candidates = Candidates(options)
    network, tokens, config = _load(options, "premise", LongTexts(options.on_too_long))
    return ZeroShotEngine(network, tokens, candidates, config)


def _load(
    options: SequenceClassifierOptions, takes: Takes, long_texts: LongTexts
) -> tuple[TorchNetwork, TextTokens, ModelConfig]:
    folder = find_folder(options.model)
    check_tokenizer(folder)
    int8 = check_quantize(options.quantize, options.dtype)
    module, place, missing = load_pretrained(
        AutoModelForSequenceClassification, folder, options.device, options.dtype, adapter=options.adapter
    )
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
    tokenizer = load_tokenizer(folder)
    inputs = frozenset(tokenizer.model_input_names) | {"input_ids", "attention_mask"}
    call = _Logits(module)
    network = TorchNetwork(folder, module, place, call, inputs, by_length(module), no_packing=packing.use(module))
    network.adapter = options.adapter
    network.allow_graphs(options.enforce_eager)
    if takes_threads(module):
        network.allow_parts()
    config = with_own_settings(folder, module.config.to_dict())
    return network, tokens_for(tokenizer, config, takes, options.max_model_len, long_texts), config


def _give_padding(module: PreTrainedModel) -> None:
    """Add a padding token to the table of a decoder that has none: it reads a text's last token that is no padding.

    No text has the new token, so it cannot be taken for the end of one.
    """
    config = module.config.get_text_config()
    if config.pad_token_id is None and config.vocab_size is not None:
        pad = module.get_input_embeddings().num_embeddings
        module.resize_token_embeddings(pad + 1, mean_resizing=False)
        module.config.pad_token_id = config.pad_token_id = pad


class _Logits:
    """Calls a sequence classifier.

    Of a row, the classifier gets one state for each text: that of its first token, or of the last where a decoder's
    states are scored.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._score = getattr(module, "score", None)
        if self._score is None:
            packing.first_states(module.base_model)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row = packing.current()
        if row is None:
            logits: torch.Tensor = self._module(**tensors).logits
        elif self._score is not None:
            states = packing.states(self._module.base_model, tensors, row)
            logits = self._score(packing.pooled(states, row, "lasttoken"))
        else:
            logits = self._module(**packing.inputs(self._module.base_model, tensors)).logits
        return logits
