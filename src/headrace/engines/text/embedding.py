"""Text embeddings with sentence-transformers models and plain transformers encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from sentence_transformers import SentenceTransformer

from headrace.engines.networks.heads import VectorHead, matryoshka_dimensions
from headrace.engines.networks.quantizing import OutputDtype, check_output_dtype, length_of
from headrace.engines.options import EncoderOptions
from headrace.engines.text import static
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.modules import open_encoder
from headrace.engines.text.quantizing import Quantize, check_quantize, to_int8
from headrace.errors import ConfigError


class EmbeddingEngine(TextEngine):
    """One vector per text, with the pooling, dense layers and normalisation that the model's files specify.

    Args:
        model: a local folder; None for all-MiniLM-L6-v2.
        quantize: "int8" to multiply 8-bit integers in the encoder's linear layers (needs the extra quantize).
        truncate_dim: number of leading components to keep (Matryoshka models); only normalised again with `normalize`.
        normalize: scale each vector to length 1. A model may do that by itself.
        output_dtype: "float32", "int8", "uint8", "binary" or "ubinary"; see `quantizing.quantized`.
        options: those of every engine for models of sentence-transformers.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        quantize: Quantize = None,
        truncate_dim: int | None = None,
        normalize: bool = False,
        output_dtype: OutputDtype = "float32",
        **options: Unpack[EncoderOptions],
    ) -> None:
        check_output_dtype(output_dtype)  # before the model is loaded
        int8 = check_quantize(quantize, options.get("dtype", "auto"))
        encoder = open_encoder(model, SentenceTransformer, options)
        module = encoder.module
        if int8 and encoder.is_static:
            raise ConfigError("quantize: this model has no layers to quantize, only a table of vectors; leave it out")
        if int8:
            to_int8(module[0].model)
        facts: dict[str, object] = {"engine": "embedding", **encoder.facts}
        # Left out at their defaults, as before these options existed: an older output can be continued.
        if normalize:
            facts["normalize"] = True
        if output_dtype != "float32":
            facts["output_dtype"] = output_dtype
        wanted = module.truncate_dim if truncate_dim is None else truncate_dim
        head = VectorHead(wanted, normalize=normalize, output_dtype=output_dtype)
        tokens = encoder.tokens()
        network = encoder.network(_Pooled(module, tokens.prompt_length), tokens.inputs)
        super().__init__(network, tokens, head, facts)
        dimension = facts["dimension"] = _choose_dimension(self.width, wanted)
        self.profile = replace(
            static.profile(self.profile, options.get("max_model_len")) if encoder.is_static else self.profile,
            dimension=length_of(dimension, output_dtype),
            matryoshka=matryoshka_dimensions(encoder.config, dimension) if output_dtype == "float32" else (),
            prompt_names=tuple(encoder.prompts.named),
        )


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


def _choose_dimension(dimension: int, wanted: int | None) -> int:
    if wanted is None:
        return dimension
    if not 1 <= wanted <= dimension:
        raise ConfigError(f"truncate_dim is {wanted}; this model's vectors have {dimension} components")
    return wanted
