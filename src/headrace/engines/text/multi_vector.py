"""Multi-vector embeddings with late-interaction encoders (ColBERT) of sentence-transformers: a vector per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from headrace.columns import Column, PreparedColumn, values_of
from headrace.device.pipeline import OutputRows
from headrace.engines.base import Prepared, PreparedRecords, PromptedText
from headrace.engines.capabilities import TokenSpans
from headrace.engines.networks import packing
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.modules import Encoder, open_encoder
from headrace.engines.text.options import MultiVectorEmbedding
from headrace.engines.text.token_rows import TokenRows, Tokens, offsets_of
from headrace.engines.text.tokenizing import TOKEN_PLACES, TextTokens
from headrace.errors import EngineError, RecordError
from headrace.records import Json

TokenVectors: TypeAlias = NDArray[np.float32] | NDArray[np.float16]
"""The vectors of one text, of shape (tokens, components)."""

_QUERY, _DOCUMENT = "query", "document"
_MODULES = frozenset({"Transformer", "Dense", "MultiVectorMask", "Normalize"})


class MultiVectorEngine(TextEngine):
    """One vector for each token of a text that takes part in late interaction.

    A text is a document, unless its prompt is the one named "query". A document has no vectors for the words in the
    model's skip list. A query has vectors for the model's expansion tokens too.

    Args:
        options: `prompt_name` is "document" by default.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded, or the model is not a multi-vector encoder of texts.
    """

    def __init__(self, options: MultiVectorEmbedding) -> None:
        output_dtype = options.output_dtype
        if options.prompt_name is None and options.prompt is None:
            options = replace(options, prompt_name=_DOCUMENT)
        encoder = open_encoder(MultiVectorEncoder, options)
        mask = _mask_of(encoder)
        named = encoder.prompts.named
        asks = options.prompt_name == _QUERY
        queries = encoder.tokens(replace(encoder.prompts, default=named.get(_QUERY, "")), _query_length(encoder))
        documents = encoder.tokens(limit=encoder.processing.max_length or encoder.module[0].document_length)
        expansion = encoder.module[0].query_expansion
        self._texts = _LateTokens(documents, queries, asks, expansion, _expansion_id(encoder))
        self._skipped = [] if mask._skiplist_ids is None else mask._skiplist_ids.tolist()
        self._skips_queries = _QUERY in mask.skiplist_tasks
        self._skips_documents = _DOCUMENT in mask.skiplist_tasks
        self._dtype = np.dtype(output_dtype)
        facts: dict[str, object] = {
            "engine": "multi-vector-embedding",
            "output_dtype": output_dtype,
            "prompt": encoder.prompts.default,
            "query": asks,
        }
        network = encoder.network(_Caller(encoder.module), documents.inputs | {TOKEN_PLACES}, per_token=True)
        super().__init__(network, documents, list, facts, per_token=True)
        self.preparer = self._texts
        self.profile = replace(self.profile, prompt_names=tuple(named))

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords:
        return self._texts.prepare(inputs)

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        return self._texts.prepare_column(inputs)

    def tokenize(self, value: object, add_special_tokens: bool) -> list[int]:
        """The ids of a text without expansion tokens, before they are cut."""
        return self._asked_as.tokenize(value, add_special_tokens)

    @property
    def token_spans(self) -> TokenSpans:
        return self._asked_as.token_spans

    @property
    def _asked_as(self) -> TextTokens:
        return self._texts.queries if self._texts.asks else self._texts.documents

    def _outputs(self, batch: TokenRows, rows: OutputRows) -> list[TokenVectors | RecordError]:
        takes_part = self._takes_part(batch)
        ends = offsets_of(takes_part)[batch.offsets]
        with np.errstate(over="ignore"):
            vectors: TokenVectors = rows[takes_part].astype(self._dtype, copy=False)
        found = [vectors[start:end] for start, end in pairwise(ends.tolist())]
        if self._dtype == np.float32 or np.isfinite(vectors).all():
            return list(found)
        refusal = RecordError(f"the vectors hold NaN or a number that {self._dtype} cannot hold")
        return [one if np.isfinite(one).all() else refusal for one in found]

    def _takes_part(self, batch: TokenRows) -> NDArray[np.bool_]:
        """Which tokens have a vector."""
        queries = np.zeros(len(batch), bool) if batch.expanded is None else batch.expanded
        skips = np.where(queries, self._skips_queries, self._skips_documents)
        return ~(np.repeat(skips, batch.lengths) & np.isin(batch.flat[0], self._skipped))


@dataclass(frozen=True, slots=True)
class _LateTokens:
    """Tokens of queries and documents."""

    documents: TextTokens
    queries: TextTokens
    asks: bool
    """Whether a text without a prompt of its own is a query."""
    expansion: Json
    """The settings of the model's query expansion."""
    expansion_id: int

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords:
        are_queries = [self._is_query(value) for value in inputs]
        queries = iter(self.queries.prepare(_where(inputs, are_queries)))
        documents = iter(self.documents.prepare(_where(inputs, [not one for one in are_queries])))
        return [self._expanded(next(queries)) if is_query else next(documents) for is_query in are_queries]

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        values = values_of(inputs)
        if any(map(self._is_query, values)):
            return self.documents.column_of(self.prepare(values)).prepared()
        return self.documents.prepare_column(values)

    def _is_query(self, value: object) -> bool:
        return value.prompt_name == _QUERY if isinstance(value, PromptedText) else self.asks

    def _expanded(self, query: Prepared[Tokens] | Exception) -> Prepared[Tokens] | Exception:
        if isinstance(query, Exception):
            return query
        missing, attended = 0, False
        if self.expansion is not None:
            missing, attended = max(self.expansion["length"] - query.cost, 0), bool(self.expansion["attend"])
        tokens = self.queries.expanded(query.payload, [self.expansion_id] * missing, attended)
        return Prepared(tokens, tokens.shape[1], query.truncated)


class _Caller:
    """Runs the encoder and the modules after it, in float32; returns the vectors of all texts' tokens in a row."""

    def __init__(self, module: MultiVectorEncoder) -> None:
        self._encoder, *rest = (part for part in module)
        self._rest = [part.float() for part in rest if not isinstance(part, MultiVectorMask)]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row = packing.current()
        if row is not None:
            features = {"token_embeddings": packing.states(self._encoder.model, tensors, row)}
        else:
            features = self._encoder({name: tensor for name, tensor in tensors.items() if name != TOKEN_PLACES})
        features["token_embeddings"] = features["token_embeddings"].float()
        for part in self._rest:
            features = part(features)
        vectors: torch.Tensor = features["token_embeddings"]
        return vectors if row is not None else vectors.flatten(0, 1)[tensors[TOKEN_PLACES]]


def _where(inputs: Sequence[object], wanted: Sequence[bool]) -> list[object]:
    return [value for value, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]


def _mask_of(encoder: Encoder[MultiVectorEncoder]) -> MultiVectorMask:
    """The module that says which tokens take part.

    Raises:
        EngineError: the model has others than the usual modules, reads more than texts, or is not trained.
    """
    module, named = encoder.module, f"the model in {encoder.folder}"
    other = next((type(part).__name__ for part in module if type(part).__name__ not in _MODULES), None)
    if other is not None:
        raise EngineError(f"{named} has the module {other} of sentence-transformers, which is not supported")
    if set(module[0].modality_config) != {"text"}:
        raise EngineError(f"{named} reads {', '.join(sorted(module[0].modality_config))}; only texts are supported")
    if not (encoder.folder / "modules.json").is_file() and "HF_ColBERT" not in (
        encoder.config.get("architectures") or ()
    ):
        raise EngineError(f"{named} is not a multi-vector (ColBERT) encoder: it has no projection of token vectors")
    masks = [part for part in module if isinstance(part, MultiVectorMask)]
    if len(masks) != 1 or masks[0].keep_only_token_ids:
        raise EngineError(
            f"{named} has {len(masks)} MultiVectorMask modules, or one for images; one for texts is supported"
        )
    return masks[0]


def _query_length(encoder: Encoder[MultiVectorEncoder]) -> int | None:
    """The most tokens of a query; None for the model's own length."""
    expansion = encoder.module[0].query_expansion
    if expansion and expansion["strategy"] == "fixed":
        return int(expansion["length"])
    length = encoder.processing.max_length or encoder.module[0].query_length
    return None if length is None else int(length)


def _expansion_id(encoder: Encoder[MultiVectorEncoder]) -> int:
    """The token that fills a query up. Raises EngineError: it would be put before the query."""
    expansion, tokenizer = encoder.module[0].query_expansion, encoder.module.tokenizer
    if expansion is None:
        return 0
    if tokenizer.padding_side != "right":
        raise EngineError(f"the model in {encoder.folder} puts expansion tokens before a query, which is not supported")
    if expansion["token"] is not None:
        return int(tokenizer.convert_tokens_to_ids(expansion["token"]))
    return int(tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id)
