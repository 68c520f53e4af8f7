"""Text embeddings with sentence-transformers models and plain transformers encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from headrace.engines.networks import packing
from headrace.engines.networks.heads import VectorHead, matryoshka_dimensions
from headrace.engines.networks.quantizing import length_of
from headrace.engines.text import static
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.modules import open_encoder
from headrace.engines.text.options import Embedding
from headrace.engines.text.quantizing import check_quantize, to_int8
from headrace.errors import ConfigError


class EmbeddingEngine(TextEngine):
    """One vector per text, with the pooling, dense layers and normalisation that the model's files specify."""

    def __init__(self, options: Embedding) -> None:
        normalize, output_dtype = options.normalize, options.output_dtype
        int8 = check_quantize(options.quantize, options.dtype)
        encoder = open_encoder(SentenceTransformer, options)
        module = encoder.module
        if int8 and encoder.is_static:
            raise ConfigError(
                "``quantize``: this model has no layers to quantize, only a table of vectors; leave it out"
            )
        if int8:
            to_int8(module[0].model)
        facts: dict[str, object] = {"engine": "embedding", **encoder.facts}
        # Left out at their defaults, as before these options existed: an older output can be continued.
        if normalize:
            facts["normalize"] = True
        if output_dtype != "float32":
            facts["output_dtype"] = output_dtype
        wanted = module.truncate_dim if options.truncate_dim is None else options.truncate_dim
        head = VectorHead(wanted, normalize=normalize, output_dtype=output_dtype)
        tokens = encoder.tokens()
        call = _Pooled(module, tokens.prompt_length)
        network = encoder.network(call, tokens.inputs, no_packing=call.no_packing)
        super().__init__(network, tokens, head, facts)
        dimension = facts["dimension"] = _choose_dimension(self.width, wanted)
        self.profile = replace(
            static.profile(self.profile, options.max_model_len) if encoder.is_static else self.profile,
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
        self.no_packing = self._why_not()
        """Why it takes no row; empty if it can be tried."""

    def _why_not(self) -> str:
        pooling = self._rest[0] if self._rest else None
        if pooling is None or type(pooling) is not Pooling:
            return "its vectors are not made by pooling"
        modes = pooling.pooling_mode
        self._modes = (modes,) if isinstance(modes, str) else tuple(modes)
        kinds = {type(part) for part in self._rest[1:]}
        if others := set(self._modes) - set(packing.POOLED):
            return f"its pooling is {min(others)}"
        if self._prompt and not pooling.include_prompt:
            return "its pooling leaves out the prompt"
        if not kinds <= {Dense, Normalize, LayerNorm}:
            return f"it has the module {min(kind.__name__ for kind in kinds - {Dense, Normalize, LayerNorm})}"
        return ""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row = packing.current()
        if row is not None:
            states = packing.states(self._encoder.model, tensors, row).float()
            pooled = [packing.pooled(states, row, mode) for mode in self._modes]
            found: dict[str, torch.Tensor] = {
                "sentence_embedding": torch.cat(pooled, dim=-1) if pooled[1:] else pooled[0]
            }
            for part in self._rest[1:]:
                found = part(found)
            return found["sentence_embedding"]
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
        raise ConfigError(f"``truncate_dim`` is {wanted}; this model's vectors have {dimension} components")
    return wanted
