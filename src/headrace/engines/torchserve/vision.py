"""TorchServe's handlers of images, where TorchServe is not installed: to be used as they are or derived from."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from headrace.engines.torchserve.base_handler import BaseHandler
from headrace.engines.torchserve.tools import map_class_to_label


class ImageNetProcessing:
    """An image as most classifiers were trained on it: its middle, 224 pixels wide and high, normalized.

    What torchvision's `Resize(256)`, `CenterCrop(224)`, `ToTensor` and `Normalize` do one after the other.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Channels, rows, columns."""
        width, height = image.size
        short = min(width, height)
        image = image.resize((256 * width // short, 256 * height // short), Image.Resampling.BILINEAR)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        pixels = to_tensor(image.crop((left, top, left + 224, top + 224)))
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Channels, rows, columns; each number between 0 and 1."""
    pixels = np.array(image, dtype=np.float32) / 255
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


class VisionHandler(BaseHandler):
    """Images, as bytes, in Base64 or as lists of numbers, to one tensor by `image_processing`."""

    image_processing: Callable[[Image.Image], torch.Tensor] = ImageNetProcessing()

    def preprocess(self, data: Sequence[Mapping[str, object]]) -> torch.Tensor:
        """Rows, channels, and the two of an image."""
        return torch.stack([self._image(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _image(self, value: object) -> torch.Tensor:
        if isinstance(value, str):
            value = base64.b64decode(value)
        if not isinstance(value, (bytes, bytearray)):
            return torch.FloatTensor(value)
        return self.image_processing(Image.open(io.BytesIO(value)))


class ImageClassifier(VisionHandler):
    """The likeliest classes of each image, five if there are so many, with their probabilities."""

    topk = 5

    def set_max_result_classes(self, topk: int) -> None:
        """How many classes an answer has."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Likewise."""
        return self.topk

    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """Probabilities by label."""
        found = torch.topk(torch.softmax(data, dim=1), min(self.topk, data.shape[1]), dim=1)
        return map_class_to_label(found.values.tolist(), self.mapping, found.indices.tolist())


class ImageSegmenter(VisionHandler):
    """The likeliest class of each pixel, with its probability."""

    def postprocess(self, data: Mapping[str, torch.Tensor]) -> list[Any]:
        """Rows, columns, and the two of a pixel for each image."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        rows: list[object] = torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()
        return rows


class ObjectDetector(VisionHandler):
    """What is seen on each image with a score of `threshold` or more, and where."""

    image_processing: Callable[[Image.Image], torch.Tensor] = staticmethod(to_tensor)
    threshold = 0.5

    def postprocess(self, data: Sequence[Mapping[str, torch.Tensor]]) -> list[Any]:
        """A list for each image: boxes by label, with their score."""
        return [self._found(image) for image in data]

    def _found(self, image: Mapping[str, torch.Tensor]) -> list[dict[str, object]]:
        sure = image["scores"] >= self.threshold
        boxes, labels, scores = (image[name][sure].tolist() for name in ("boxes", "labels", "scores"))
        named = map_class_to_label([[box] for box in boxes], self.mapping, [[label] for label in labels])
        return [one | {"score": score} for one, score in zip(named, scores, strict=True)]
