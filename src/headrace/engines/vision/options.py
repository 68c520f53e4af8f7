"""Engines for images on PyTorch, declared."""

from __future__ import annotations

from headrace.engines.declaring import EngineOptions
from headrace.engines.model_folder import WEIGHTS
from headrace.engines.options import DeviceOptions, ImageOptions, LabelOptions


class _ImagesOnTorch(EngineOptions):
    engine = "torch"
    extra = "vision"
    weights = WEIGHTS
    by_transformers = True
    preparing = "headrace.engines.vision.transform"
    order = 0


class ImageClassification(ImageOptions, LabelOptions, DeviceOptions, _ImagesOnTorch):
    """The labels of images."""

    task = "image-classify"
    factory = "headrace.engines.vision.engine:image_classify"


class ImageEmbedding(ImageOptions, DeviceOptions, _ImagesOnTorch):
    """One vector for each image."""

    task = "image-embed"
    factory = "headrace.engines.vision.engine:image_embed"
