"""Image tasks for any network: one row per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.columns import Column, PreparedColumn
from headrace.engines.base import Prepared
from headrace.engines.model_config import ModelConfig
from headrace.engines.networks.base import BATCH_IMAGES, Network, NetworkEngine, in_groups
from headrace.engines.networks.heads import Head, LabelHead, VectorHead, label_function, label_names
from headrace.engines.profile import EngineProfile
from headrace.engines.vision.images import ImageInputs
from headrace.engines.vision.pixels import PixelColumn, Pixels

RAW_PIXELS = "raw_pixels"
"""The input of a network that normalises pixels of 8 bits on its device, where that saves copies."""


class ImageEngine(NetworkEngine):
    """One output per image.

    Args:
        facts: further facts that determine the output, such as the engine's name.
    """

    def __init__(self, network: Network, images: ImageInputs, head: Head, facts: Mapping[str, object]) -> None:
        self.network = network
        self._images = images
        self._head = head
        self._facts = facts
        size = BATCH_IMAGES[network.kind]
        self.profile = EngineProfile(
            tunable=True,
            batching="batches",
            overlaps=network.overlaps,
            cost_unit="records",
            batch_cost=size,
            batch_size=size,
            prepare_rows=16,  # an image takes some milliseconds and hundreds of kilobytes
            prepares_columns=images.preparer is not None,
        )
        self.preparer = images.preparer

    def describe(self) -> Mapping[str, object]:
        return {**self._facts, **self.network.describe(), **self._images.describe()}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[Pixels] | Exception]:
        return self._images.prepare(inputs)

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Pixels of each image, in 8 bits; a RecordError for an invalid one."""
        assert self.preparer is not None, "the profile says that it prepares columns"
        return self.preparer.prepare_column(inputs)

    def forward(self, batch: list[Pixels] | PixelColumn) -> Sequence[object]:
        """One output per image. Images of different sizes run in separate batches."""
        if not len(batch):
            return []
        if isinstance(batch, PixelColumn):
            if RAW_PIXELS in self.network.inputs:
                return self._head(self.network.run({RAW_PIXELS: batch.values}))
            return self._head(self.network.run({"pixel_values": batch.normalization(batch.values)}))
        return in_groups(
            batch,
            lambda pixels: pixels.shape,
            lambda some: self._head(self.network.run({"pixel_values": np.stack(some)})),
        )


def image_classifier(network: Network, images: ImageInputs, config: ModelConfig, top_labels: int | None) -> ImageEngine:
    names = label_names(config)
    function = label_function(config, len(names))
    facts = {"engine": "image-classification", "labels": names, "scores": function, "top_labels": top_labels}
    return ImageEngine(network, images, LabelHead(names, function, top_labels), facts)


def image_embedder(network: Network, images: ImageInputs) -> ImageEngine:
    return ImageEngine(network, images, VectorHead(None), {"engine": "image-embedding"})
