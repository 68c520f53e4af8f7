"""Requests with images: base64, a data URL, or `{"image": ...}` with either."""

from __future__ import annotations

import base64
import binascii
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import BaseRequest, VectorRequest


class Image(BaseModel):
    """An image as an object, as in Jina's API."""

    model_config = ConfigDict(extra="forbid")

    image: str


Images: TypeAlias = str | Image | list[str | Image]
"""One or more images."""


class ImageClassifyRequest(BaseRequest):
    """POST /classify."""

    input: Images


class ImageEmbeddingRequest(VectorRequest):
    """POST /v1/embeddings."""

    input: Images


def images_of(given: Images) -> list[str]:
    listed = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else one.image for one in listed]


def decode_images(images: list[str]) -> list[bytes]:
    """Decode images. File names and URLs are refused: the server does not open them for a client.

    Raises:
        ApiError: 400 for an image that is not base64.
    """
    return [_decoded(image, index) for index, image in enumerate(images)]


def _decoded(image: str, index: int) -> bytes:
    header, comma, encoded = image.partition(",") if image.startswith("data:") else ("", "", image)
    if comma and not header.endswith(";base64"):
        raise _invalid(index, "its data URL must have the form data:image/png;base64,...")
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(index, "it must be base64 or a data URL; URLs and file names are not opened") from None
    if not content:
        raise _invalid(index, "it is empty")
    return content


def _invalid(index: int, why: str) -> ApiError:
    return ApiError(400, f"image {index} of input: {why}", code="invalid_image", param="input")
