"""Make a network's input of images as the model's processor specifies."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL.Image import Resampling
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17 hides it without torchvision
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from headrace.engines.base import Prepared
from headrace.engines.options import MAX_PIXELS, PixelsOption
from headrace.engines.vision.pixels import Normalization, Pixels, RawPixels
from headrace.engines.vision.transform import ImageTransform, file_of, preparer_of
from headrace.errors import ConfigError, RecordError, first_line

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

_STEPS = ("preprocess", "_preprocess", "process_image", "center_crop", "rescale", "normalize")
"""What a processor must inherit from transformers, beside `resize`, so that its settings say what it does."""
_TESTED = ((9, 7), (20, 150), (320, 240))
"""Width and height of test images. There are larger ones, according to the network's size."""
_TESTED_PIXELS = 10_000_000
"""Test images that are or become larger than this are left out."""
_ROUNDING = 1e-6
_NEAR = 4
"""How far pixels of the fast way may be from the processor's, of 255."""
_NEAR_ON_AVERAGE = 0.5


class ImageInputs:
    """Preprocesses images. Thread-safe; decoding and resizing release the GIL.

    Pixels are those that the processor makes of the image as `ImageTransform.decoded` returns it. Transparent pixels
    become white if the processor says `do_convert_rgb`, as it makes them itself from transformers 5.21 on; else
    transparency is dropped, as by transformers' pipelines.

    Args:
        max_pixels: a larger image is refused before it is decoded.
        pixels: "auto" for a faster way, if test images then have nearly the processor's pixels; or "exact".
    """

    def __init__(
        self, processor: BaseImageProcessor, max_pixels: int = MAX_PIXELS, pixels: PixelsOption = "auto"
    ) -> None:
        self._processor = processor
        self.max_pixels = max_pixels
        self._opened = ImageTransform(max_pixels, bool(getattr(processor, "do_convert_rgb", False)))
        self._resized = _resizing_of(processor, self._opened)
        self.normalization = _normalization_of(processor)
        self.transform = self._tested(
            _transform_of(processor, self._opened, self._resized),
            fast=pixels == "auto" and find_spec("torch") is not None,
        )
        """Makes the pixels, if the processor's settings say how; else None, and the processor makes them."""
        self.preparer = preparer_of(self.transform, self.normalization)
        """Prepares blocks; None if images have several shapes."""

    def describe(self) -> Mapping[str, object]:
        """What determines the pixels, beside the model's files."""
        # The exact way is left out, as before there was another: an older output can be continued in it.
        fast = self.transform is not None and self.transform.fast
        return {"max_pixels": self.max_pixels, **({"pixels": "auto"} if fast else {})}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[Pixels] | Exception]:
        """Pixels of each image: a path, bytes, a data URL, or a dict with one of these as `bytes` or `path`.

        Every image costs 1. The result is a RecordError for an invalid image.
        """
        return [self._prepare(value) for value in inputs]

    def sample(self) -> Pixels:
        """A test image. Raises RecordError: the model's images have more pixels than allowed."""
        return self._by_processor(_test_image(320, 240))

    def _prepare(self, value: object) -> Prepared[Pixels] | Exception:
        try:
            if self.transform is not None and self.normalization is not None:
                return Prepared(self.normalization(self.transform(value)), cost=1)
            return Prepared(self._by_processor(self._opened.decoded(file_of(value))), cost=1)
        except RecordError as error:
            return error

    def _by_processor(self, image: Image.Image) -> Pixels:
        if self._resized is not None:
            # The processor would return the same pixels, but copies the whole image as an array. After this resize it
            # finds that the image already has the right size.
            image = Image.fromarray(self._resized.resized(image))
        return _processed(self._processor, image)

    def _tested(self, transform: ImageTransform | None, *, fast: bool) -> ImageTransform | None:
        """The fastest transform whose pixels of test images are those of the processor, or nearly; None for none."""
        if transform is None or self.normalization is None:
            return None
        free = replace(transform, max_pixels=_TESTED_PIXELS)
        high, wide = transform.size if isinstance(transform.size, tuple) else (transform.size or 1,) * 2
        sizes = (*_TESTED, (wide * 5 // 2, high * 31 // 10), (wide * 3 + 1, high * 2 + 3), (wide * 2, high * 4))
        images = [_test_image(*size) for size in sizes if free.takes(*size)]
        found = [free.resized(image) for image in images]
        wanted = [_processed(self._processor, image) for image in images]
        if not images or not all(map(_equal, map(self.normalization, found), wanted)):
            return None
        quick = replace(free, fast=True)
        if fast and all(map(_near, map(quick.resized, images), found)) and _decodes_nearly(quick):
            return replace(transform, fast=True)
        return transform


def images_for(folder: Path, max_pixels: int, pixels: PixelsOption) -> ImageInputs:
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
    return ImageInputs(processor, max_pixels, pixels)


def _resizing_of(processor: BaseImageProcessor, opened: ImageTransform) -> ImageTransform | None:
    """How the processor resizes first; None if only the processor knows."""
    if not processor.do_resize or getattr(type(processor), "resize", None) is not PilBackend.resize:
        return None
    wanted: Mapping[str, int | None] = dict(processor.size)
    size: tuple[int, int] | int | None = None
    if wanted.get("height") and wanted.get("width"):
        size = int(wanted["height"] or 0), int(wanted["width"] or 0)
    elif wanted.get("shortest_edge") and not wanted.get("longest_edge"):
        size = int(wanted["shortest_edge"] or 0)
    return None if size is None else replace(opened, size=size, resample=Resampling(processor.resample))


def _transform_of(
    processor: BaseImageProcessor, opened: ImageTransform, resized: ImageTransform | None
) -> ImageTransform | None:
    """All that the processor does before it normalises; None if it is of a kind that may do more.

    Args:
        resized: resizes them, too, if that is known.
    """
    kind = type(processor)
    if kind is ConvNextImageProcessorPil:
        return _convnext_of(processor, opened)
    if (
        resized is None
        or processor.do_pad
        or any(getattr(kind, step, None) is not getattr(PilBackend, step) for step in _STEPS)
    ):
        return None
    if not processor.do_center_crop:
        return resized
    wanted: Mapping[str, int | None] = dict(processor.crop_size)
    if not wanted.get("height") or not wanted.get("width"):
        return None
    return replace(resized, crop=(int(wanted["height"] or 0), int(wanted["width"] or 0)))


def _convnext_of(processor: ConvNextImageProcessorPil, opened: ImageTransform) -> ImageTransform | None:
    """The same for models of ConvNeXT and ResNet, which resize small images to more than they keep of them."""
    edge = dict(processor.size).get("shortest_edge")
    if not edge or not processor.do_resize or processor.do_center_crop:
        return None
    resampled = replace(opened, resample=Resampling(processor.resample))
    if edge >= 384:
        return replace(resampled, size=(edge, edge))
    return replace(resampled, size=int(edge / processor.crop_pct), crop=(edge, edge))


def _normalization_of(processor: BaseImageProcessor) -> Normalization | None:
    scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return Normalization(scale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    mean, std = (np.broadcast_to(values, 3).tolist() for values in (processor.image_mean, processor.image_std))
    return Normalization(scale, tuple(mean), tuple(std))


def _processed(processor: BaseImageProcessor, image: Image.Image) -> Pixels:
    made = processor(images=image, return_tensors="np")
    pixels: Pixels = np.ascontiguousarray(made["pixel_values"][0], dtype=np.float32)
    return pixels


def _equal(ours: Pixels, theirs: Pixels) -> bool:
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, rtol=_ROUNDING, atol=_ROUNDING))


def _near(ours: RawPixels, theirs: RawPixels) -> bool:
    if ours.shape != theirs.shape:
        return False
    difference = np.abs(ours.astype(int) - theirs)
    return bool(difference.max() <= _NEAR and difference.mean() <= _NEAR_ON_AVERAGE)


def _decodes_nearly(transform: ImageTransform) -> bool:
    """Whether JPEG files that are decoded at a half, a quarter and an eighth of their size have nearly its pixels."""
    small = replace(transform, size=(32, 32), crop=None)
    for size in ((300, 257), (777, 1030), (1100, 1030)):
        file = io.BytesIO()
        _test_image(16, 12).resize(size, Resampling.BICUBIC).save(file, "JPEG", quality=90)
        whole = replace(small, fast=False)(file.getvalue())
        if not _near(small.decoded_small(file), whole):
            return False
    return True


def _test_image(width: int, height: int) -> Image.Image:
    values = np.arange(height * width * 3).reshape(height, width, 3) * 7919 % 251
    return Image.fromarray(values.astype(np.uint8))
