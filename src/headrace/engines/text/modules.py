"""Load models of sentence-transformers with their tokens, for engines of dense, sparse and multi-vector embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import StaticEmbedding, Transformer

from headrace.device.pipeline import NetworkCall
from headrace.device.placement import choose_device, choose_dtype
from headrace.engines.library_settings import (
    LATE_INTERACTION,
    LOADING,
    PROMPTS,
    Processing,
    check_settings,
    processing_of,
)
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import check_tokenizer, find_folder
from headrace.engines.networks import packing
from headrace.engines.networks.adapters import merge
from headrace.engines.networks.files import check_fast
from headrace.engines.networks.pytorch import TorchNetwork, loading
from headrace.engines.options import EncoderOptions
from headrace.engines.text import static
from headrace.engines.text.encoders import by_length, takes_threads, tune
from headrace.engines.text.max_length import choose_length, usable_positions
from headrace.engines.text.prompts import Prompts, chosen_prompt
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.tokenizing import TextTokens, without_special_tokens
from headrace.errors import ConfigError, EngineError

ModuleT = TypeVar("ModuleT", SentenceTransformer, SparseEncoder, MultiVectorEncoder)

_OWN_SETTINGS: Mapping[type, frozenset[str]] = {
    SentenceTransformer: frozenset({"truncate_dim"}),
    SparseEncoder: frozenset({"max_active_dims"}),
    MultiVectorEncoder: LATE_INTERACTION,
}
"""The settings that each kind of model has beside those of all."""

_UNSUPPORTED = frozenset({"Asym", "BoW", "CNN", "LSTM", "Router", "WordEmbeddings", "WordWeights"})
"""Modules of sentence-transformers that choose by input, or depend on the words beside a text."""

_SOME_LENGTHS = {
    "canine": "computes no text of fewer than 4 characters",
    "nystromformer": "computes only texts of its longest length",
}
"""Architectures that fail at texts of some lengths, by model type."""


@dataclass(frozen=True, slots=True)
class Encoder(Generic[ModuleT]):
    """A loaded model, and how it reads texts."""

    folder: Path
    device: torch.device
    module: ModuleT
    config: ModelConfig
    """Its config.json; empty for static embeddings."""
    prompts: Prompts
    options: EncoderOptions
    processing: Processing

    @property
    def is_static(self) -> bool:
        """Whether its vectors are a table."""
        return isinstance(self.module[0], StaticEmbedding)

    @property
    def facts(self) -> Mapping[str, object]:
        """The prompt, which determines an output. Left out at its default, as before it could be chosen: an older
        output can be continued."""
        asked = self.options.prompt is not None or self.options.prompt_name is not None
        return {"prompt": self.prompts.default} if asked else {}

    def tokens(self, prompts: Prompts | None = None, limit: int | None = None) -> TextTokens:
        """The tokenization of texts with these prompts (None for `self.prompts`), cut to `limit` or the model's length.

        Raises:
            ConfigError: the option `max_model_len` is out of range.
        """
        own = self.processing.max_length or (static.LONGEST if self.is_static else self.module.max_seq_length)
        tokenizer = static.tokenizer_of(self.module[0]) if self.is_static else self.module.tokenizer
        if not self.processing.special_tokens:
            tokenizer = without_special_tokens(tokenizer)
        shortest = tokenizer.num_special_tokens_to_add() + 1
        wanted = self.options.max_model_len
        length = choose_length([limit or own], usable_positions(self.config), shortest, wanted)
        too_long = LongTexts.of(self.options)
        pad_id = self.config.get("pad_token_id")
        return TextTokens(tokenizer, length, too_long, prompts=prompts or self.prompts, pad_id=pad_id)

    def network(
        self,
        call: NetworkCall,
        inputs: frozenset[str],
        *,
        per_token: bool = False,
        no_packing: str = "",
    ) -> TorchNetwork:
        """The network that runs `call` with these inputs, which returns one row per text, or per token.

        `no_packing` is why the call takes no row, if it does not.
        """
        if self.is_static:
            return TorchNetwork(self.folder, self.module, self.device, static.bagged(call), inputs, no_packing="")
        model = self.module[0].model
        why_not = packing.use(model) or no_packing
        network = TorchNetwork(
            self.folder, self.module, self.device, call, inputs, by_length(model), no_packing=why_not
        )
        network.adapter = self.options.adapter
        if not per_token:  # the number of tokens differs in batches of one shape
            network.allow_graphs(self.options.enforce_eager)
            if takes_threads(model):
                network.allow_parts()
        return network


def open_encoder(kind: type[ModuleT], options: EncoderOptions) -> Encoder[ModuleT]:
    """Load a model of this kind; None for all-MiniLM-L6-v2.

    Raises:
        ConfigError: no such folder, or an option that the model does not support.
        EngineError: the files cannot be loaded, or it has modules that are not supported.
    """
    folder = find_folder(options.model)
    check_tokenizer(folder)
    check_settings(folder, LOADING | PROMPTS | _OWN_SETTINGS[kind])
    processing = processing_of(folder)
    device = choose_device(options.device)
    module = _load(folder, device, kind, options)
    prompts = _prompts(module, options.prompt_name, options.prompt)
    config: ModelConfig = {} if isinstance(module[0], StaticEmbedding) else module[0].config.to_dict()
    return Encoder(folder, device, module, config, prompts, options, processing)


def _load(folder: Path, device: torch.device, kind: type[ModuleT], options: EncoderOptions) -> ModuleT:
    torch_dtype = choose_dtype(options.dtype, device)
    with loading(folder):
        module = kind(
            str(folder),
            device=str(device),
            local_files_only=True,
            trust_remote_code=options.trust_remote_code,
            model_kwargs={"dtype": torch_dtype},
        )
    unsupported = next((part for part in module if type(part).__name__ in _UNSUPPORTED), None)
    if unsupported is not None or not isinstance(module[0], (Transformer, StaticEmbedding)):
        name = type(unsupported or module[0]).__name__
        raise EngineError(
            f"the model in {folder} has the module {name} of sentence-transformers, which is not supported"
        )
    if isinstance(module[0], StaticEmbedding):
        static.check_dtype(options.dtype)
        static.check_weights(folder)
        if options.adapter is not None:
            raise ConfigError("``adapter`` does not go with a model whose vectors are a table: leave it out")
        return module.float().eval()
    check_fast(folder, module.tokenizer)
    if reason := _SOME_LENGTHS.get(module[0].model.config.model_type):
        raise EngineError(f"the model in {folder} {reason}, and texts have other lengths; choose another model")
    random = _not_loaded(module[0].model)
    if random:
        raise EngineError(f"the model in {folder} holds no weights for {', '.join(random[:3])}; copy the whole folder")
    if options.adapter is not None:
        merge(module[0].model, options.adapter)
    module.eval()
    tune(module[0].model)
    return module


def _not_loaded(network: torch.nn.Module) -> list[str]:
    """Parameters that are missing in the model's files, which transformers has initialised with random numbers.

    sentence-transformers does not report them, so this reads the mark that transformers sets on loaded parameters. The
    model's pooling layer is ignored: it is not used.
    """
    if getattr(network, "_hf_peft_config_loaded", False):
        return []  # an adapter's parameters are not marked
    parameters = dict(network.named_parameters())
    loaded = {name for name, parameter in parameters.items() if getattr(parameter, "_is_hf_initialized", False)}
    return [name for name in parameters if name not in loaded and not name.startswith("pooler.")] if loaded else []


def _prompts(module: ModuleT, prompt_name: str | None, prompt: str | None) -> Prompts:
    """The prompts of a model. If its pooling leaves out the prompt, it must be the same for all texts."""
    default = chosen_prompt(module.prompts, module.default_prompt_name, prompt_name, prompt)
    in_pooling = all(getattr(part, "include_prompt", True) for part in module)
    return Prompts(default, dict(module.prompts) if in_pooling else {})
