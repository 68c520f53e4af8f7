"""Text embeddings with sentence-transformers models and plain transformers encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer

from headrace.device.placement import choose_device, choose_dtype
from headrace.engines.heads import VectorHead, matryoshka_dimensions
from headrace.engines.model_folder import check_tokenizer, find_folder
from headrace.engines.text.encoders import by_length, tune
from headrace.engines.text.tasks import TextEngine
from headrace.engines.text.tokenizing import TextTokens, TooLong, choose_length, usable_positions
from headrace.engines.torch_network import TorchNetwork, loading
from headrace.errors import ConfigError, EngineError


class EmbeddingEngine(TextEngine):
    """One vector per text, with the pooling, dense layers and normalisation that the model's files specify.

    Args:
        model: a local folder; None for all-MiniLM-L6-v2.
        device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the weights' dtype on CUDA; a job may choose, see docs/tuning.md), "float32",
            "float16" or "bfloat16".
        max_model_len: in tokens; None for the model's limit.
        on_too_long: truncate a longer text, or fail its record.
        truncate_dim: number of leading components to keep (Matryoshka models); not normalised again.
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
        max_model_len: int | None = None,
        on_too_long: TooLong = "truncate",
        truncate_dim: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        folder = find_folder(model)
        check_tokenizer(folder)
        place = choose_device(device)
        module = _load(folder, place, dtype, trust_remote_code=trust_remote_code)
        dimension = _choose_dimension(module, truncate_dim)
        tokenizer = module.tokenizer
        config = module[0].config.to_dict()
        length = choose_length(
            [module.max_seq_length],
            usable_positions(config),
            tokenizer.num_special_tokens_to_add() + 1,
            max_model_len,
        )
        prompt = module.prompts.get(module.default_prompt_name) or ""
        tokens = TextTokens(tokenizer, length, on_too_long, prefix=prompt, pad_id=config.get("pad_token_id"))
        inputs = frozenset(tokenizer.model_input_names) | {"input_ids", "attention_mask"}
        super().__init__(
            TorchNetwork(
                folder, module, place, _Pooled(module, tokens.prefix_length), inputs, by_length(module[0].model)
            ),
            tokens,
            VectorHead(dimension),
            {"engine": "embedding", "dimension": dimension},
        )
        self.profile = replace(self.profile, dimension=dimension, matryoshka=matryoshka_dimensions(config, dimension))


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


def _load(folder: Path, device: torch.device, dtype: str, *, trust_remote_code: bool) -> SentenceTransformer:
    torch_dtype = choose_dtype(dtype, device)
    with loading(folder):
        module = SentenceTransformer(
            str(folder),
            device=str(device),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": torch_dtype},
        )
    if not isinstance(module[0], Transformer) or not getattr(module.tokenizer, "is_fast", False):
        raise EngineError(f"the model in {folder} is not a transformer with a fast tokenizer (tokenizer.json)")
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


def _choose_dimension(module: SentenceTransformer, wanted: int | None) -> int:
    dimension = int(module.get_embedding_dimension())
    if wanted is None:
        return dimension
    if not 1 <= wanted <= dimension:
        raise ConfigError(f"truncate_dim is {wanted}; this model's vectors have {dimension} components")
    return wanted
