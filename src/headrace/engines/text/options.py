"""Engines for texts on PyTorch, declared."""

from __future__ import annotations

from typing import Literal, TypeAlias

from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import DEFAULT_MODEL, WEIGHTS
from headrace.engines.options import (
    PANEL,
    AdapterOptions,
    CandidateOptions,
    ChunkOptions,
    DeviceOptions,
    EncoderOptions,
    GraphOptions,
    Int8Options,
    LabelOptions,
    TextOptions,
    VectorOptions,
)
from headrace.options import option

TokenVectorDtype: TypeAlias = Literal["float32", "float16"]


class _TextsOnTorch(EngineOptions):
    engine = "torch"
    extra = "torch"
    weights = WEIGHTS
    by_transformers = True
    preparing = "headrace.engines.text.tokenizing"
    order = 0


class Embedding(VectorOptions, Int8Options, EncoderOptions, _TextsOnTorch):
    """One vector for each text."""

    task = "embed"
    factory = "headrace.engines.text.embedding:EmbeddingEngine"
    default_model = DEFAULT_MODEL
    splits = True


class SparseEmbedding(EncoderOptions, _TextsOnTorch):
    """The weights of some words for each text."""

    task = "sparse-embed"
    factory = "headrace.engines.text.sparse:SparseEngine"

    max_active_dims: int | None = option(
        None, "How many components of a vector to keep, the largest. Default: the model's own limit.", minimum=1
    )


class MultiVectorEmbedding(EncoderOptions, _TextsOnTorch):
    """A vector for each token of a text."""

    task = "multi-vector-embed"
    factory = "headrace.engines.text.multi_vector:MultiVectorEngine"

    output_dtype: TokenVectorDtype = option("float32", "Type of a vector's numbers. Default: float32.", panel=PANEL)


class SequenceClassifierOptions(TextOptions, GraphOptions, Int8Options, AdapterOptions, DeviceOptions, _TextsOnTorch):
    """Options of all engines for sequence classification models."""


class Classification(LabelOptions, ChunkOptions, SequenceClassifierOptions):
    """The labels of texts, or of pairs."""

    task = "classify"
    factory = "headrace.engines.text.classification:classify"
    splits = True


class Scoring(ChunkOptions, SequenceClassifierOptions):
    """One score for each pair of texts."""

    task = "score"
    factory = "headrace.engines.text.classification:score"
    splits = True


class ZeroShot(SequenceClassifierOptions, CandidateOptions):
    """Labels of the user's own, for texts."""

    task = "zero-shot"
    factory = "headrace.engines.text.classification:zero_shot"
