"""Decode, rotate and resize images as the model's processor specifies."""

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
from PIL.PngImagePlugin import PngImageFile
from transformers import AutoImageProcessor
from transformers.image_transforms import convert_to_rgb

from headrace.engines.base import Prepared
from headrace.engines.options import MAX_PIXELS
from headrace.errors import ConfigError, RecordError, first_line

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

Pixels: TypeAlias = NDArray[np.float32]
"""One preprocessed image, of shape (channels, height, width)."""

# Errors that decoders raise on damaged files, found by fuzzing each format. An error that is missing here would end the
# job instead of the record.
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
    Warning,  # if a program turns warnings into errors
)


_OTHER_BITS = ("L;2", "L;4", "RGB;16B")
"""Layouts of PNG whose pixels Pillow decodes to 8 bits, but not the transparent colour."""


class ImageInputs:
    """Preprocesses images. Thread-safe; decoding and resizing release the GIL.

    Of an animated image, the first frame is used; of 16-bit pixels, the upper 8 bits. All colours become RGB, and the
    EXIF orientation is applied. Transparent pixels become white if the processor says `do_convert_rgb`, as it makes
    them itself; else transparency is dropped, as by transformers' pipelines.

    Args:
        processor: a transformers image processor for PIL images.
        max_pixels: a larger image is refused before it is decoded.
    """

    def __init__(self, processor: BaseImageProcessor, max_pixels: int = MAX_PIXELS) -> None:
        self._processor = processor
        self.max_pixels = max_pixels

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[Pixels] | Exception]:
        """Pixels of each image: a path, bytes, a data URL, or a dict with one of these as `bytes` or `path`.

        Every image costs 1. The result is a RecordError for an invalid image.
        """
        return [self._prepare(value) for value in inputs]

    def sample(self) -> Pixels:
        """A test image.

        Raises:
            RecordError: the model's images have more pixels than allowed.
        """
        values = np.arange(240 * 320 * 3).reshape(240, 320, 3) * 7919 % 251
        return self._pixels(Image.fromarray(values.astype(np.uint8)))

    def _prepare(self, value: object) -> Prepared[Pixels] | Exception:
        try:
            return Prepared(self._pixels(self._decoded(_file_of(value))), cost=1)
        except RecordError as error:
            return error

    def _decoded(self, file: Path | io.BytesIO) -> Image.Image:
        """The image in RGB with its EXIF orientation applied."""
        try:
            with Image.open(file) as image:
                self._check_size(image)
                _check_transparency(image)
                image.load()
                return self._rgb(ImageOps.exif_transpose(_as_8_bits(image)))
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

    def _rgb(self, image: Image.Image) -> Image.Image:
        if not getattr(self._processor, "do_convert_rgb", False):
            image.info.pop("transparency", None)  # Pillow warns of some that it drops
            return image.convert("RGB")
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        # Without the palette's transparency, which the processor would find in a converted image and apply again.
        return Image.fromarray(convert_to_rgb(image, return_numpy=True))

    def _check_size(self, image: Image.Image) -> None:
        if image.width * image.height > self.max_pixels:
            raise RecordError(
                f"the image is too large: {image.width} × {image.height} pixels, more than max_pixels {self.max_pixels}"
            )

    def _pixels(self, image: Image.Image) -> Pixels:
        """The network's input."""
        size = self._target_size(image)
        if size is not None and size != image.size:
            if math.prod(size) > self.max_pixels:
                raise RecordError(f"the image is too narrow: resized, {image.width} × {image.height} becomes {size}")
            # The processor would return the same pixels, but copies the whole image as an array. After this resize it
            # finds that the image already has the right size.
            image = image.resize(size, self._processor.resample)
        made = self._processor(images=image, return_tensors="np")
        pixels: Pixels = np.ascontiguousarray(made["pixel_values"][0], dtype=np.float32)
        return pixels

    def _target_size(self, image: Image.Image) -> tuple[int, int] | None:
        """The (width, height) that the processor resizes to first; None if only the processor can compute it."""
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
    """Create the image preprocessing from a model's folder.

    Raises:
        ConfigError: the folder has no usable image processor, or `max_pixels` is out of range.
    """
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ConfigError(f"model {str(folder)!r} holds no preprocessor_config.json, which says how images are resized")
    try:
        processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model {str(folder)!r} has no image processor that can be used: {first_line(error)}"
        ) from error
    return ImageInputs(processor, max_pixels)


def _inherited_resize(processor: BaseImageProcessor) -> object:
    """The `resize` that most processors inherit; None if there is none."""
    return next(
        (getattr(kind, "resize", None) for kind in type(processor).__mro__ if kind.__name__ == "PilBackend"), None
    )


def _file_of(value: object) -> Path | io.BytesIO:
    """The file or bytes of an image.

    Raises:
        RecordError: the value is neither a path nor bytes.
    """
    if isinstance(value, dict):  # the format of Hugging Face datasets
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
    saved = ": save it to a file or to bytes, as with image.save(io.BytesIO(), 'PNG')"
    way_out = saved if isinstance(value, Image.Image) else ""
    raise RecordError(f"expected an image (a path, bytes or a data URL), got {kind}{way_out}")


def _check_transparency(image: Image.Image) -> None:
    """Check that Pillow finds the transparent pixels of an image that is not yet decoded.

    Raises:
        RecordError: one colour is transparent, in another number of bits than the decoded pixels have.
    """
    if not isinstance(image, PngImageFile) or "transparency" not in image.info:
        return
    layout = image.tile[0].args
    if layout in _OTHER_BITS:
        raise RecordError(
            f"the image has a transparent colour ({image.info['transparency']}) in the layout {layout}, which "
            "cannot be told in 8 bits; convert it to 8 bits with an alpha channel"
        )


def _as_8_bits(image: Image.Image) -> Image.Image:
    """Reduce 16-bit pixels to their upper 8 bits, to keep the brightness in RGB.

    Raises:
        RecordError: the pixels have 32 bits, without a defined range.
    """
    if image.mode.startswith("I;16"):
        pixels = np.asarray(image).astype(np.uint16)
        narrow = Image.fromarray((pixels >> 8).astype(np.uint8))
        narrow.info = {**image.info}  # keeps the orientation
        clear = narrow.info.pop("transparency", None)
        if clear is not None:
            narrow.putalpha(Image.fromarray((pixels != clear).astype(np.uint8) * 255))
        return narrow
    if image.mode in ("I", "F"):
        raise RecordError(
            f"the image has pixels of 32 bits (mode {image.mode}) without a defined range; convert it to 8"
        )
    return image
