"""Text embeddings with sentence-transformers models and plain transformers encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import StaticEmbedding, Transformer

from headrace.device.placement import choose_device, choose_dtype
from headrace.engines.heads import ChunkJoin, VectorHead, matryoshka_dimensions
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import check_tokenizer, find_folder
from headrace.engines.quantizing import OutputDtype, check_output_dtype, length_of
from headrace.engines.text import static
from headrace.engines.text.encoders import by_length, tune
from headrace.engines.text.prompts import Prompts, chosen_prompt
from headrace.engines.text.quantizing import Quantize, check_quantize, to_int8
from headrace.engines.text.splitting import LongTexts, TooLong
from headrace.engines.text.tasks import TextEngine
from headrace.engines.text.tokenizing import TextTokens, choose_length, usable_positions
from headrace.engines.torch_network import TorchNetwork, loading
from headrace.errors import ConfigError, EngineError

ModuleT = TypeVar("ModuleT", SentenceTransformer, SparseEncoder)

_UNSUPPORTED = frozenset({"Asym", "BoW", "CNN", "LSTM", "Router", "WordEmbeddings", "WordWeights"})
"""Modules of sentence-transformers that choose by input, or depend on the words beside a text."""


class EmbeddingEngine(TextEngine):
    """One vector per text, with the pooling, dense layers and normalisation that the model's files specify.

    Args:
        model: a local folder; None for all-MiniLM-L6-v2.
        device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the weights' dtype on CUDA; a job may choose, see docs/tuning.md), "float32",
            "float16" or "bfloat16".
        quantize: "int8" to multiply 8-bit integers in the encoder's linear layers (needs the extra quantize).
        max_model_len: in tokens; None for the model's limit.
        on_too_long: truncate a longer text, fail its record, or split it into chunks.
        chunk_overlap: tokens that neighbouring chunks have in common; None for none.
        chunk_join: how the outputs for the chunks become one; None for the default of the task.
        truncate_dim: number of leading components to keep (Matryoshka models); only normalised again with `normalize`.
        normalize: scale each vector to length 1. A model may do that by itself.
        output_dtype: "float32", "int8", "uint8", "binary" or "ubinary"; see `quantizing.quantized`.
        prompt_name: name of one of the model's prompts, which goes before each text; None for the model's default.
        prompt: the same as text.
        trust_remote_code: run Python code from the model's folder.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded.
    """

    def __init__(  # noqa: PLR0913  # keyword-only options, each with a flag
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: Quantize = None,
        max_model_len: int | None = None,
        on_too_long: TooLong = "truncate",
        chunk_overlap: int | None = None,
        chunk_join: ChunkJoin | None = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        output_dtype: OutputDtype = "float32",
        prompt_name: str | None = None,
        prompt: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        check_output_dtype(output_dtype)  # before the model is loaded
        long_texts = LongTexts(on_too_long, chunk_overlap, chunk_join)
        folder = find_folder(model)
        check_tokenizer(folder)
        place = choose_device(device)
        int8 = check_quantize(quantize, dtype)
        module = load(folder, place, dtype, kind=SentenceTransformer, trust_remote_code=trust_remote_code)
        dimension = _choose_dimension(module, truncate_dim)
        is_static = isinstance(module[0], StaticEmbedding)
        if int8 and is_static:
            raise ConfigError("quantize: this model has no layers to quantize, only a table of vectors; leave it out")
        if int8:
            to_int8(module[0].model)
        tokenizer = static.tokenizer_of(module[0]) if is_static else module.tokenizer
        config: ModelConfig = {} if is_static else module[0].config.to_dict()
        length = choose_length(
            [static.LONGEST if is_static else module.max_seq_length],
            usable_positions(config),
            tokenizer.num_special_tokens_to_add() + 1,
            max_model_len,
        )
        prompts = prompts_of(module, prompt_name, prompt)
        tokens = TextTokens(tokenizer, length, long_texts, prompts=prompts, pad_id=config.get("pad_token_id"))
        inputs = frozenset(tokenizer.model_input_names) | {"input_ids", "attention_mask"}
        facts: dict[str, object] = {"engine": "embedding", "dimension": dimension}
        # Left out at their defaults, as before these options existed: an older output can be continued.
        if normalize:
            facts["normalize"] = True
        if output_dtype != "float32":
            facts["output_dtype"] = output_dtype
        if prompt is not None or prompt_name is not None:
            facts["prompt"] = prompts.default
        network = _network(folder, module, place, inputs, tokens.prompt_length)
        head = VectorHead(dimension, normalize=normalize, output_dtype=output_dtype)
        super().__init__(network, tokens, head, facts)
        self.profile = replace(
            static.profile(self.profile, max_model_len) if is_static else self.profile,
            dimension=length_of(dimension, output_dtype),
            matryoshka=matryoshka_dimensions(config, dimension) if output_dtype == "float32" else (),
            prompt_names=tuple(prompts.named),
        )


def _network(
    folder: Path, module: SentenceTransformer, place: torch.device, inputs: frozenset[str], prompt_length: int
) -> TorchNetwork:
    call = _Pooled(module, prompt_length)
    if isinstance(module[0], StaticEmbedding):
        return TorchNetwork(folder, module, place, static.bagged(call), inputs)
    return TorchNetwork(folder, module, place, call, inputs, by_length(module[0].model))


class _Pooled:
    """Calls a sentence-transformers model. Some exclude the prompt from pooling and need its length.

    Everything after the encoder (pooling, dense layers, normalisation) is little work and runs in float32: in 16 bits
    the length of a normalised vector is off by up to 0.4 %.
    """

    def __init__(self, module: SentenceTransformer, prompt_length: int) -> None:
        self._encoder, *self._rest = (part for part in module)
        for part in self._rest:
            part.float()
        self._prompt = {"prompt_length": prompt_length} if prompt_length else {}

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        features: dict[str, object] = {**tensors, **self._prompt}
        features = self._encoder(features)
        for name, value in features.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                features[name] = value.float()
        for part in self._rest:
            features = part(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors


def load(folder: Path, device: torch.device, dtype: str, *, kind: type[ModuleT], trust_remote_code: bool) -> ModuleT:
    """Load a model of sentence-transformers of this kind.

    Raises:
        EngineError: the files cannot be loaded, or it has modules that are not supported.
    """
    torch_dtype = choose_dtype(dtype, device)
    with loading(folder):
        module = kind(
            str(folder),
            device=str(device),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": torch_dtype},
        )
    unsupported = next((part for part in module if type(part).__name__ in _UNSUPPORTED), None)
    if unsupported is not None or not isinstance(module[0], (Transformer, StaticEmbedding)):
        name = type(unsupported or module[0]).__name__
        raise EngineError(
            f"the model in {folder} has the module {name} of sentence-transformers, which is not supported"
        )
    if isinstance(module[0], StaticEmbedding):
        static.check_dtype(dtype)
        return module.float().eval()
    if not getattr(module.tokenizer, "is_fast", False):
        raise EngineError(f"the model in {folder} has no fast tokenizer (tokenizer.json)")
    random = _not_loaded(module[0].model)
    if random:
        raise EngineError(f"the model in {folder} holds no weights for {', '.join(random[:3])}; copy the whole folder")
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


def prompts_of(module: SentenceTransformer | SparseEncoder, prompt_name: str | None, prompt: str | None) -> Prompts:
    """The prompts of a model. If its pooling leaves out the prompt, it must be the same for all texts."""
    default = chosen_prompt(module.prompts, module.default_prompt_name, prompt_name, prompt)
    in_pooling = all(getattr(part, "include_prompt", True) for part in module)
    return Prompts(default, dict(module.prompts) if in_pooling else {})


def _choose_dimension(module: SentenceTransformer, wanted: int | None) -> int:
    dimension = int(module.get_embedding_dimension())
    if wanted is None:
        return dimension
    if not 1 <= wanted <= dimension:
        raise ConfigError(f"truncate_dim is {wanted}; this model's vectors have {dimension} components")
    return wanted
