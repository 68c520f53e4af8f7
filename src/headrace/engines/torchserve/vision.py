"""Replacements for TorchServe's image handlers, if TorchServe is not installed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image

from headrace.engines.torchserve.base_handler import BaseHandler
from headrace.engines.torchserve.tools import map_class_to_label


class ImageNetProcessing:
    """The usual ImageNet preprocessing: the normalized center crop of 224 × 224 pixels.

    The same as torchvision's `Resize(256)`, `CenterCrop(224)`, `ToTensor` and `Normalize`.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        width, height = image.size
        short = min(width, height)
        image = image.resize((256 * width // short, 256 * height // short), Image.Resampling.BILINEAR)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        pixels = to_tensor(image.crop((left, top, left + 224, top + 224)))
        mean, std = (pixels.new_tensor(one)[:, None, None] for one in (self.mean, self.std))
        return (pixels - mean) / std


def to_tensor(image: Image.Image) -> torch.Tensor:
    """A tensor of shape (channels, rows, columns) with values between 0 and 1."""
    pixels = np.array(image, dtype=np.float32) / 255
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


class VisionHandler(BaseHandler):
    """Converts images (bytes, Base64 or lists of numbers) to one tensor with `image_processing`."""

    image_processing: Callable[[Image.Image], torch.Tensor] = ImageNetProcessing()

    def preprocess(self, data: Sequence[Mapping[str, object]]) -> torch.Tensor:
        return torch.stack([self._image(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _image(self, value: object) -> torch.Tensor:
        if isinstance(value, str):
            value = base64.b64decode(value)
        if not isinstance(value, (bytes, bytearray)):
            return torch.FloatTensor(value)
        return self.image_processing(Image.open(io.BytesIO(value)))


class ImageClassifier(VisionHandler):
    """The most likely classes of each image, at most five by default, with their probabilities."""

    topk = 5

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: torch.Tensor) -> Sequence[object]:
        found = torch.topk(torch.softmax(data, dim=1), min(self.topk, data.shape[1]), dim=1)
        return map_class_to_label(found.values.tolist(), self.mapping, found.indices.tolist())


class ImageSegmenter(VisionHandler):
    """The most likely class of each pixel, with its probability."""

    def postprocess(self, data: Mapping[str, torch.Tensor]) -> Sequence[object]:
        """Per image, a list of shape (rows, columns, 2) with class and probability."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        rows: list[object] = torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()
        return rows


class ObjectDetector(VisionHandler):
    """The objects in each image with a score of at least `threshold`, and their boxes."""

    image_processing: Callable[[Image.Image], torch.Tensor] = staticmethod(to_tensor)
    threshold = 0.5

    def postprocess(self, data: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[object]:
        """Per image, a list of boxes by label, with their scores."""
        return [self._found(image) for image in data]

    def _found(self, image: Mapping[str, torch.Tensor]) -> list[dict[str, object]]:
        sure = image["scores"] >= self.threshold
        boxes, labels, scores = (image[name][sure].tolist() for name in ("boxes", "labels", "scores"))
        named = map_class_to_label([[box] for box in boxes], self.mapping, [[label] for label in labels])
        return [one | {"score": score} for one, score in zip(named, scores, strict=True)]
