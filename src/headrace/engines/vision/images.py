"""Images for a model: files of every kind decoded, turned upright, resized, as a model's processor says."""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.Image import DecompressionBombError, DecompressionBombWarning
from transformers import AutoImageProcessor

from headrace.engines.base import Prepared
from headrace.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

Pixels: TypeAlias = NDArray[np.float32]
"""One image for the model: (channels, height, width)."""

MAX_PIXELS = 89_478_485
"""A quarter of a gigabyte as RGB: beyond that an image is more likely an attack on memory than a picture."""

# What decoders raise on damaged bytes, found by changing bytes of good files of each format at random. A kind that is
# missing here would end the job instead of the record.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    AttributeError,
    RuntimeError,
    AssertionError,
    struct.error,
    zlib.error,
    Warning,  # where a program makes them errors
)


class ImageInputs:
    """Prepares images on any number of threads at once; decoding and resizing let other threads run.

    An animated image stands for its first frame, an image of 16 bits for its upper 8, transparency is dropped, CMYK
    and palettes become RGB, and an image that says it lies on its side is turned.

    Args:
        processor: a transformers image processor that works on PIL images.
        max_pixels: a larger image is refused before it is decoded.
    """

    def __init__(self, processor: BaseImageProcessor, max_pixels: int = MAX_PIXELS) -> None:
        if max_pixels < 1:
            raise ConfigError(f"max_pixels is {max_pixels}; it must be >= 1")
        self._processor = processor
        self.max_pixels = max_pixels

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[Pixels] | Exception]:
        """Pixels of each image: a path, the bytes of a file, a data URL, or a dict with one of these as bytes or path.

        An image costs 1, whatever its size was. A RecordError where it is no image that can be taken.
        """
        return [self._prepare(value) for value in inputs]

    def _prepare(self, value: object) -> Prepared[Pixels] | Exception:
        try:
            return Prepared(self._pixels(self._decoded(_file_of(value))), cost=1)
        except RecordError as error:
            return error

    def _decoded(self, file: Path | io.BytesIO) -> Image.Image:
        """The image upright and in RGB."""
        try:
            with Image.open(file) as image:
                self._check_size(image)
                image.load()
                return ImageOps.exif_transpose(_as_8_bits(image)).convert("RGB")
        except RecordError:
            raise
        except FileNotFoundError as error:
            raise RecordError(f"there is no image file {str(file)!r}") from error
        except (DecompressionBombError, DecompressionBombWarning) as error:
            raise RecordError(f"the image is too large: {error}") from error
        except _DAMAGE as error:
            raise RecordError(f"the image cannot be decoded: {str(error) or type(error).__name__}") from error
        except MemoryError as error:
            raise RecordError("the image is too large for this machine's memory") from error

    def _check_size(self, image: Image.Image) -> None:
        if image.width * image.height > self.max_pixels:
            raise RecordError(
                f"the image is too large: {image.width} × {image.height} pixels, more than max_pixels {self.max_pixels}"
            )

    def _pixels(self, image: Image.Image) -> Pixels:
        """What the network takes."""
        size = self._target_size(image)
        if size is not None and size != image.size:
            if math.prod(size) > self.max_pixels:
                raise RecordError(f"the image is too narrow: resized, {image.width} × {image.height} becomes {size}")
            # The processor would give the same pixels, but through copies of the whole image as an array; what it is
            # given here it finds to have the right size already.
            image = image.resize(size, self._processor.resample)
        made = self._processor(images=image, return_tensors="np")
        pixels: Pixels = np.ascontiguousarray(made["pixel_values"][0], dtype=np.float32)
        return pixels

    def _target_size(self, image: Image.Image) -> tuple[int, int] | None:
        """(width, height) that the processor resizes to before anything else; None where it is for it to say."""
        processor = self._processor
        if not processor.do_resize or type(processor).resize is not _inherited_resize(processor):
            return None
        wanted: Mapping[str, int | None] = dict(processor.size)
        if wanted.get("height") and wanted.get("width"):
            return int(wanted["width"] or 0), int(wanted["height"] or 0)
        shortest = wanted.get("shortest_edge")
        if not shortest or wanted.get("longest_edge"):
            return None
        narrow, wide = sorted(image.size)
        other = int(shortest * wide / narrow)
        return (shortest, other) if image.width <= image.height else (other, shortest)


def images_for(folder: Path, max_pixels: int) -> ImageInputs:
    """The images of a model, by the processor its folder describes.

    Raises:
        ConfigError: the folder says nothing about images, or `max_pixels` is out of range.
    """
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ConfigError(f"model {str(folder)!r} holds no preprocessor_config.json, which says how images are resized")
    try:
        processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {str(folder)!r} has no image processor that can be used: {reason}") from error
    return ImageInputs(processor, max_pixels)


def _inherited_resize(processor: BaseImageProcessor) -> object:
    """The `resize` that most processors share; one with its own may do anything."""
    return next(
        (getattr(kind, "resize", None) for kind in type(processor).__mro__ if kind.__name__ == "PilBackend"), None
    )


def _file_of(value: object) -> Path | io.BytesIO:
    """Where an image's bytes are.

    Raises:
        RecordError: the value names no file and holds no bytes.
    """
    if isinstance(value, dict):  # as Hugging Face datasets keep an image
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return io.BytesIO(value)
    if isinstance(value, str) and value.startswith("data:"):
        _, _, encoded = value.partition(";base64,")
        try:
            return io.BytesIO(base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError) as error:
            raise RecordError(f"the image's data URL is not base64: {error}") from error
    if isinstance(value, str) and "\0" not in value and value:
        return Path(value)
    if isinstance(value, Path):
        return value
    kind = "null" if value is None else type(value).__name__
    raise RecordError(f"expected an image (a path, bytes or a data URL), got {kind}")


def _as_8_bits(image: Image.Image) -> Image.Image:
    """An image whose conversion to RGB keeps its brightness: of 16 bits, the upper 8.

    Raises:
        RecordError: pixels without a range that says what is white.
    """
    if image.mode.startswith("I;16"):
        narrow = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        narrow.info = image.info  # keeps the orientation
        return narrow
    if image.mode in ("I", "F"):
        raise RecordError(f"the image has pixels of 32 bits (mode {image.mode}), which say no range; convert it to 8")
    return image
