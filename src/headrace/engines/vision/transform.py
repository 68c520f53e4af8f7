"""From the file of an image to its pixels in 8 bits, without a model: a transform can be sent to other processes."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image, ImageOps
from PIL.Image import DecompressionBombError, DecompressionBombWarning, Resampling
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from headrace.columns import Column, PreparedColumn, values_of
from headrace.engines.vision.pixels import Normalization, PixelColumn, RawPixels
from headrace.errors import RecordError

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
_MEMORY = re.compile(" <_io.BytesIO object at 0x[0-9a-fA-F]+>")
"""What Pillow calls bytes, which is another name each time."""
_ON_ITS_SIDE = (5, 6, 7, 8)
"""Values of EXIF's orientation that swap width and height."""
_TORCH_MODES = {Resampling.BILINEAR: ("bilinear", 1), Resampling.BICUBIC: ("bicubic", 2)}
"""The resampling that PyTorch has, too, and from which ratio on its pixels are nearly Pillow's: it rounds weights to 16
bits, and resizes the width first, which Pillow 13 does not always. Between the two, bicubic overshoots are cut off."""
_GAP = 4
"""A JPEG file is decoded at a half, quarter or eighth of its size if that is at least this many times the size wanted.
With 4, photographs differ by 0.1 of 255 on average, and noise by 0.4."""


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """Decodes, turns, resizes and crops images. Thread-safe; decoding and resizing release the GIL.

    Of an animated image, the first frame is used; of 16-bit pixels, the upper 8 bits. All colours become RGB, and the
    EXIF orientation is applied.
    """

    max_pixels: int
    """A larger image is refused before it is decoded."""
    on_white: bool
    """Whether transparent pixels become white; else transparency is dropped."""
    size: tuple[int, int] | int | None = None
    """The height and width to resize to, or the length of the shorter edge; None for no resizing."""
    resample: Resampling = Resampling.BILINEAR
    crop: tuple[int, int] | None = None
    """Height and width of the centre to keep; None for all."""
    fast: bool = False
    """Whether to resize with PyTorch, and to decode large JPEG files at a fraction of their size."""

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width of every image that it makes; None if they vary."""
        return self.crop or (self.size if isinstance(self.size, tuple) else None)

    def __call__(self, value: object) -> RawPixels:
        """Pixels of an image: a path, bytes, a data URL, or a dict with one of these as `bytes` or `path`.

        Raises:
            RecordError: it is no image, damaged or too large.
        """
        file = file_of(value)
        if self.fast:
            try:
                return self.decoded_small(file)
            except (*_DAMAGE, DecompressionBombError, MemoryError, RecordError):
                # At its full size it may be readable, else the reason is told as for any other image.
                if isinstance(file, io.BytesIO):
                    file.seek(0)
        return replace(self, fast=False).resized(self.decoded(file))

    def decoded(self, file: Path | io.BytesIO) -> Image.Image:
        """The image in RGB at its full size, with its EXIF orientation applied. Errors as a call."""
        try:
            with Image.open(file) as image:
                self._check(image)
                image.load()
                return self._rgb(_upright(_as_8_bits(image)))
        except RecordError:
            raise
        except FileNotFoundError as error:
            raise RecordError(f"there is no image file {str(file)!r}") from error
        except (DecompressionBombError, DecompressionBombWarning) as error:
            raise RecordError(f"the image is too large: {error}") from error
        except _DAMAGE as error:
            reason = _MEMORY.sub("", str(error)) or type(error).__name__
            raise RecordError(f"the image cannot be decoded: {reason}") from error
        except MemoryError as error:
            raise RecordError("the image is too large for this machine's memory") from error

    def resized(self, image: Image.Image) -> RawPixels:
        """Pixels of an image in RGB. Raises RecordError: resizing would make it too large."""
        size = self._size_for(image.width, image.height)
        return self._cropped(self._resized(image, size, image.size))

    def decoded_small(self, file: Path | io.BytesIO) -> RawPixels:
        """`decoded` and `resized`. A large JPEG file is decoded at a fraction of its size, and turned afterwards."""
        with Image.open(file) as image:
            self._check(image)
            whole, (size, extent) = image.size, self._drafted(image)
            image.load()
            if extent == whole:
                return self.resized(self._rgb(_upright(_as_8_bits(image))))
            small = Image.fromarray(self._resized(self._rgb(image), size, extent))
            small.info = image.info  # says how to turn it
            return self._cropped(np.asarray(_upright(small)))

    def _drafted(self, image: Image.Image) -> tuple[tuple[int, int], tuple[float, float]]:
        """Have a JPEG file decoded at a fraction of its size: what to resize it to before it is turned; its size."""
        turned = isinstance(image, JpegImageFile) and image.getexif().get(0x0112) in _ON_ITS_SIDE
        width, height = image.size[::-1] if turned else image.size
        size = self._size_for(width, height)
        size = size[::-1] if turned else size
        drafts = isinstance(image, JpegImageFile) and image.mode in ("RGB", "L")
        made = image.draft(None, (size[0] * _GAP, size[1] * _GAP)) if drafts else None
        return size, image.size if made is None else made[1][2:]

    def takes(self, width: int, height: int) -> bool:
        """Whether an image of this size does not become too large."""
        try:
            self._size_for(width, height)
        except RecordError:
            return False
        return width * height <= self.max_pixels

    def _check(self, image: Image.Image) -> None:
        """Check an image that is not yet decoded.

        Raises:
            RecordError: it is too large, or Pillow would not find its transparent pixels.
        """
        if image.width * image.height > self.max_pixels:
            raise RecordError(
                f"the image is too large: {image.width} × {image.height} pixels, more than max_pixels {self.max_pixels}"
            )
        if not isinstance(image, PngImageFile) or "transparency" not in image.info:
            return
        layout = image.tile[0].args
        if layout in _OTHER_BITS:
            raise RecordError(
                f"the image has a transparent colour ({image.info['transparency']}) in the layout {layout}, which "
                "cannot be told in 8 bits; convert it to 8 bits with an alpha channel"
            )

    def _rgb(self, image: Image.Image) -> Image.Image:
        if self.on_white and ("A" in image.getbands() or image.info.get("transparency") is not None):
            clear = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear).convert("RGB")
        image.info.pop("transparency", None)  # Pillow warns of some that it drops
        return image if image.mode == "RGB" else image.convert("RGB")

    def _size_for(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) to resize to. Raises RecordError: it is too large."""
        if isinstance(self.size, int):
            narrow, wide = sorted((width, height))
            other = int(self.size * wide / narrow)
            size = (self.size, other) if width <= height else (other, self.size)
        else:
            size = (width, height) if self.size is None else self.size[::-1]
        if size != (width, height) and math.prod(size) > self.max_pixels:
            raise RecordError(f"the image is too narrow: resized, {width} × {height} becomes {size}")
        return size

    def _resized(self, image: Image.Image, size: tuple[int, int], extent: tuple[float, float]) -> RawPixels:
        """The image in another size; its last pixels may be of less than one of its file, so `extent` is a fraction."""
        if size == extent:
            return np.asarray(image)
        mode, ratio = _TORCH_MODES.get(self.resample, ("", math.inf)) if self.fast else ("", math.inf)
        if extent[0] >= size[0] * ratio and extent[1] >= size[1] * ratio:
            return resized_by_torch(image, size, extent, mode)
        return np.asarray(image.resize(size, self.resample, (0, 0, *extent)))

    def _cropped(self, pixels: RawPixels) -> RawPixels:
        """The centre, filled up with zeros as by transformers' `center_crop`."""
        if self.crop is None:
            return pixels
        for axis, wanted in enumerate(self.crop):
            missing = max(0, wanted - pixels.shape[axis])
            if missing:
                before = math.ceil(missing / 2)
                around = [(before, missing - before) if one == axis else (0, 0) for one in range(3)]
                pixels = np.pad(pixels, around)
            start = (pixels.shape[axis] - wanted) // 2
            pixels = pixels[start : start + wanted] if axis == 0 else pixels[:, start : start + wanted]
        return pixels


@dataclass(frozen=True, slots=True)
class ImagePreparer:
    """Prepares blocks of images of one shape. It can be pickled, and holds no model."""

    transform: ImageTransform
    normalization: Normalization
    shape: tuple[int, int]

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Pixels of each image, or a RecordError for an invalid one. Every image costs 1."""
        values = values_of(inputs)
        pixels: RawPixels = np.zeros((len(values), *self.shape, 3), dtype=np.uint8)
        errors: dict[int, Exception] = {}
        for row, value in enumerate(values):
            try:
                pixels[row] = self.transform(value)
            except RecordError as error:
                errors[row] = error
        costs = np.ones(len(values), dtype=np.int64)
        costs[list(errors)] = 0
        return PreparedColumn(PixelColumn(pixels, self.normalization), costs, errors)


def preparer_of(transform: ImageTransform | None, normalization: Normalization | None) -> ImagePreparer | None:
    """The preparer of blocks, if all images have one shape."""
    if transform is None or normalization is None or transform.shape is None:
        return None
    return ImagePreparer(transform, normalization, transform.shape)


def resized_by_torch(image: Image.Image, size: tuple[int, int], extent: tuple[float, float], mode: str) -> RawPixels:
    import torch

    values = _values_of(image)
    try:
        tensor = torch.from_dlpack(values)
    except BufferError:  # before NumPy 2.1, it does not lend memory that must not be written to
        tensor = torch.from_numpy(values.copy())
    exact = extent == image.size
    # The next larger number, since the product with the image's size is rounded down.
    factors = None if exact else [math.nextafter(size[axis] / extent[axis], math.inf) for axis in (1, 0)]
    made = torch.nn.functional.interpolate(
        tensor.permute(2, 0, 1)[None], size[::-1] if exact else None, factors, mode, antialias=True
    )
    return cast("RawPixels", made[0, :3].permute(1, 2, 0).numpy())


def _values_of(image: Image.Image) -> RawPixels:
    """(height, width, 3), or with a fourth number that means nothing: so Pillow holds pixels, and lends them to Arrow.

    A copy takes as long as resizing does, and holds Python's lock.
    """
    try:
        import pyarrow as pa

        values: RawPixels = pa.array(image).values.to_numpy()
    except (ImportError, ValueError):  # it is in several pieces of memory, as images above 16 MiB are
        return np.asarray(image)
    return values.reshape(image.height, image.width, 4)


def file_of(value: object) -> Path | io.BytesIO:
    """The file or bytes of an image. Raises RecordError: the value is neither a path nor bytes."""
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


def _upright(image: Image.Image) -> Image.Image:
    """The image with its EXIF orientation applied, in its own memory."""
    ImageOps.exif_transpose(image, in_place=True)
    return image


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
