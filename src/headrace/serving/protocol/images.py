"""Requests with images: base64, a data URL, or `{"image": ...}` with either."""

from __future__ import annotations

import base64
import binascii
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import BaseRequest, VectorRequest


class Image(BaseModel):
    """An image that is an object, as Jina's API has it."""

    model_config = ConfigDict(extra="forbid")

    image: str


Images: TypeAlias = str | Image | list[str | Image]
"""One image or several."""


class ImageClassifyRequest(BaseRequest):
    """POST /classify."""

    input: Images


class ImageEmbeddingRequest(VectorRequest):
    """POST /v1/embeddings."""

    input: Images


def images_of(given: Images) -> list[str]:
    """The images as they were written, in a list in any case."""
    listed = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else one.image for one in listed]


def decoded(images: list[str]) -> list[bytes]:
    """The bytes of image files. A name of a file or an address is refused: the server opens neither for a client.

    Raises:
        ApiError: 400, for what is no image in base64.
    """
    return [_decoded(image, place) for place, image in enumerate(images)]


def _decoded(image: str, place: int) -> bytes:
    header, comma, encoded = image.partition(",") if image.startswith("data:") else ("", "", image)
    if comma and not header.endswith(";base64"):
        raise _invalid(place, "its data URL must have the form data:image/png;base64,...")
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(place, "it must be in base64 or a data URL; addresses and file names are not opened") from None
    if not content:
        raise _invalid(place, "it is empty")
    return content


def _invalid(place: int, why: str) -> ApiError:
    return ApiError(400, f"image {place} of input: {why}", code="invalid_image", param="input")
