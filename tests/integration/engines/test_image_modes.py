"""An image in any mode of Pillow gives the pixels that the processor makes of the opened file, or is refused."""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageMode, ImageOps, features
from tests.integration.serving.running import running
from tests.small_models import encoded, picture, vision_model
from transformers import BaseImageProcessor
from transformers.image_transforms import convert_to_rgb
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from headrace.app.servers.server import ServerSettings
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import create
from headrace.engines.vision.images import ImageInputs
from headrace.errors import RecordError

SQUARE = {"height": 32, "width": 32}
PROCESSORS = {
    "CLIP": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE),
    "DINOv2": BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=SQUARE, do_convert_rgb=True),
    "SigLIP": SiglipImageProcessorPil(size=SQUARE, do_convert_rgb=True),
    "ViT": ViTImageProcessorPil(size=SQUARE),
}
KINDS = (
    "PNG",
    "TIFF",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "PPM",
    "JPEG2000",
    "TGA",
    "PCX",
    "ICO",
    "SGI",
    "AVIF",
    "DDS",
)
COLOURS = picture(40, 30)
MODES = ("1", "L", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "La", "PA", "RGBa")
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
LAYS_ON_WHITE = "return_numpy" in inspect.signature(convert_to_rgb).parameters
"""Whether processors do so themselves: those of transformers 5.20 and before drop transparency."""


def in_mode(mode: str) -> Image.Image:
    """A picture with every grade of transparency, if the mode has it."""
    grades = Image.fromarray(np.linspace(0, 255, 30 * 40).reshape(30, 40).astype(np.uint8))
    clear = COLOURS.copy()
    clear.putalpha(grades)
    if mode == "LAB":
        profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
        made = ImageCms.applyTransform(COLOURS, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
        assert made is not None
        return made
    if mode == "La":
        return clear.convert("LA").convert("La")
    if mode in ("PA", "RGBa", "LA", "RGBA"):
        made = (COLOURS.convert("P") if mode == "PA" else clear).convert(mode)
        if mode == "PA":
            made.putalpha(grades)
        return made
    if mode in SIXTEEN:
        grey = np.asarray(COLOURS.convert("L")).astype(np.uint16) * 257
        return Image.frombytes(mode, COLOURS.size, grey.astype(ImageMode.getmode(mode).typestr).tobytes())
    return COLOURS.convert(mode)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Every mode in every format of Pillow that holds it."""
    found = {}
    for mode in (*MODES, *SIXTEEN):
        for kind in KINDS:
            with contextlib.suppress(OSError, ValueError, KeyError):
                content = encoded(in_mode(mode), kind)
                with Image.open(io.BytesIO(content)) as opened:
                    opened.load()  # Pillow 12 writes some that it cannot read
                white, black = mode in SIXTEEN and opened.mode[0] != "I", mode == "I" and opened.mode.startswith("I;16")
                if not white and not black:
                    found[f"{opened.mode} in {kind} from {mode}"] = content
    clear = picture(40, 30).quantize(16)
    for name, transparency in (("one colour", 3), ("some colours", bytes(range(0, 256, 17)))):
        found[f"P in PNG, {name} transparent"] = encoded(clear, "PNG", transparency=transparency)
    found["P in GIF, transparent"] = encoded(clear, "GIF", transparency=3)
    grey = COLOURS.convert("L").point(lambda value: value // 16 * 16)
    found["L in PNG, transparent"] = encoded(grey, "PNG", transparency=128)
    found["1 in PNG, transparent"] = encoded(COLOURS.convert("1"), "PNG", transparency=1)
    few = clear.convert("RGB")
    found["RGB in PNG, transparent"] = encoded(few, "PNG", transparency=few.getpixel((5, 5)))
    frames = [in_mode("RGBA"), COLOURS.convert("RGBA")]
    for kind in ("PNG", "GIF", "WEBP"):
        moving = {"save_all": True, "append_images": frames[1:]}
        found[f"animated {kind}"] = encoded(frames[0], kind, **moving)
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "WEBP", "TIFF"):
        found[f"on its side, transparent {kind}"] = encoded(in_mode("RGBA"), kind, exif=exif)
    return found


def pixels(images: ImageInputs, value: Any) -> NDArray[np.float32]:
    [ready] = images.prepare([value])
    assert isinstance(ready, Prepared), ready
    return ready.payload


def expected(processor: BaseImageProcessor, content: bytes) -> NDArray[np.float32]:
    with Image.open(io.BytesIO(content)) as image:
        if image.mode.startswith("I;16"):  # a processor would make nearly all of it white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        upright = ImageOps.exif_transpose(image)
        if processor.do_convert_rgb and not LAYS_ON_WHITE and upright.has_transparency_data:
            clear = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
        if not processor.do_convert_rgb:  # it only takes RGB, which transformers' pipelines make first
            with warnings.catch_warnings(action="ignore"):  # of a palette's transparency, which is dropped
                upright = upright.convert("RGB")
        made: NDArray[np.float32] = processor(images=upright, return_tensors="np")["pixel_values"][0]
    return made


def test_all_modes_are_tried(files: dict[str, bytes]) -> None:
    assert {*Image.MODES} <= {*MODES, *SIXTEEN}
    opened = {name.split()[0] for name in files}
    new = {"YCbCr"} if int(features.version("pil").split(".")[0]) >= 13 else set()
    assert opened >= {"1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "I", "F", "LA", "PA", "I;16", "I;16B"} | new


@pytest.mark.parametrize("model", PROCESSORS)
def test_files_in_every_mode_give_the_pixels_of_the_processor(model: str, files: dict[str, bytes]) -> None:
    images = ImageInputs(PROCESSORS[model], pixels="exact")
    for name, content in files.items():
        if name.split()[0] in ("I", "F"):  # nothing says which value is white
            [refused] = images.prepare([content])
            assert "pixels of 32 bits" in str(refused), name
        else:
            found = pixels(images, content)
            assert np.abs(found - expected(PROCESSORS[model], content)).max() < 1e-6, name
            assert found.std() > 0.1, name


@pytest.mark.parametrize("mode", ["La", "RGBa", "HSV"])
def test_modes_that_no_file_has_do_not_pass_for_others(mode: str) -> None:
    """They come from programs alone, and an image of a program is not an input."""
    [refused] = ImageInputs(PROCESSORS["CLIP"]).prepare([in_mode(mode)])
    assert isinstance(refused, RecordError)
    assert str(refused).startswith("expected an image (a path, bytes or a data URL), got Image")


def png(depth: int, colours: int, row: bytes, transparent: bytes) -> bytes:
    """A PNG of two pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, colours, 0, 0, 0))
    content = header + chunk(b"tRNS", transparent) + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def test_one_transparent_colour_is_found_in_16_bits_and_refused_where_pillow_loses_it() -> None:
    whole = CLIPImageProcessorPil(do_resize=False, do_center_crop=False, do_normalize=False)
    images = ImageInputs(whole)
    found = pixels(images, png(16, 0, struct.pack(">2H", 0x80FF, 0x8000), struct.pack(">H", 0x80FF)))
    np.testing.assert_allclose(found[:, 0], [[1.0, 0x80 / 255]] * 3, atol=1e-6)
    for content, layout in (
        (png(16, 2, struct.pack(">6H", 0xFF, 0, 0, 0xFF00, 0, 0), struct.pack(">3H", 0xFF, 0, 0)), "RGB;16B"),
        (png(2, 0, b"\xb0", struct.pack(">H", 2)), "L;2"),
        (png(4, 0, b"\x2f", struct.pack(">H", 2)), "L;4"),
    ):
        [refused] = images.prepare([content])
        assert "a transparent colour (" in str(refused) and f"the layout {layout}, which cannot be told" in str(refused)


def test_all_ways_of_an_image_give_the_same(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = vision_model(tmp_path / "model", "clip")
    content = files["P in PNG, some colours transparent"]
    (tmp_path / "image.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    images = ImageInputs(AutoImageProcessor.from_pretrained(str(folder), backend="pil"), pixels="exact")
    wanted = expected(images._processor, content)
    for way in (content, str(tmp_path / "image.png"), f"data:image/png;base64,{text}", {"bytes": content}):
        assert np.abs(pixels(images, way) - wanted).max() < 1e-6
    engine = create("image-embed", folder, device="cpu")
    [vector] = engine.forward([one.payload for one in engine.prepare([content])])
    config = EngineConfig("image-embed", str(folder), engine_options={"device": "cpu"})
    with running(ServerSettings(config)) as server:
        served = server.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(served, vector, atol=1e-5)
