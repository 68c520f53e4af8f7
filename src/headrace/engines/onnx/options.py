"""Engines on ONNX Runtime, declared."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import ONNX_WEIGHTS
from headrace.engines.options import (
    CandidateOptions,
    ChunkOptions,
    ImageOptions,
    LabelOptions,
    OutputDtypeOptions,
    TextOptions,
)
from headrace.options import option


class OnnxOptions(EngineOptions):
    """What all of them have in common."""

    engine = "onnx"
    extra = "onnx"
    weights = ONNX_WEIGHTS
    by_transformers = True
    order = 1

    providers: Sequence[str] = option(
        (), "onnxruntime's execution providers in order, as a list in JSON. Default: all that are available."
    )


class OnnxEmbedding(OutputDtypeOptions, ChunkOptions, OnnxOptions):
    """One vector for each text: the output `sentence_embedding`, else the pooled token states."""

    task = "embed"
    factory = "headrace.engines.onnx.engine:embed"
    splits = True


class OnnxClassification(LabelOptions, ChunkOptions, OnnxOptions):
    """The labels of texts, or of pairs."""

    task = "classify"
    factory = "headrace.engines.onnx.engine:classify"
    splits = True


class OnnxScoring(ChunkOptions, OnnxOptions):
    """One score for each pair of texts."""

    task = "score"
    factory = "headrace.engines.onnx.engine:score"
    splits = True


class OnnxZeroShot(TextOptions, OnnxOptions, CandidateOptions):
    """Labels of the user's own, for texts."""

    task = "zero-shot"
    factory = "headrace.engines.onnx.engine:zero_shot"


class OnnxImageClassification(ImageOptions, LabelOptions, OnnxOptions):
    """The labels of images."""

    task = "image-classify"
    factory = "headrace.engines.onnx.engine:image_classify"


class OnnxImageEmbedding(ImageOptions, OnnxOptions):
    """One vector for each image: the output `image_embeds` or `pooler_output`, else the first."""

    task = "image-embed"
    factory = "headrace.engines.onnx.engine:image_embed"
