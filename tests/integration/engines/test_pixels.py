"""The fast way from a file to pixels: nearly the processor's pixels, the same labels and errors, or it is not used."""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tests.small_models import encoded, vision_model
from transformers import AutoModelForImageClassification, BaseImageProcessor
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.beit.image_processing_pil_beit import BeitImageProcessorPil
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.engines.vision import images as module
from headrace.engines.vision import transform as transforms
from headrace.engines.vision.engine import DeviceNormalized
from headrace.engines.vision.images import ImageInputs
from headrace.engines.vision.pixels import Normalization, PixelColumn
from headrace.engines.vision.tasks import RAW_PIXELS
from headrace.engines.vision.transform import ImageTransform
from headrace.errors import RecordError

SIZES = ((640, 480), (301, 517), (64, 48), (5, 3), (400, 31), (1, 1), (771, 1030))
PROCESSORS: dict[str, BaseImageProcessor] = {
    "ViT": ViTImageProcessorPil(size={"height": 32, "width": 32}),
    "not square": ViTImageProcessorPil(size={"height": 24, "width": 40}),
    "CLIP": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    "DINOv2": BitImageProcessorPil(size={"shortest_edge": 41}, crop_size={"height": 32, "width": 27}),
    "small, filled up": CLIPImageProcessorPil(size={"shortest_edge": 21}, crop_size={"height": 32, "width": 45}),
    "SigLIP": SiglipImageProcessorPil(size={"height": 32, "width": 32}),
    "not normalised": ViTImageProcessorPil(size={"height": 32, "width": 32}, do_normalize=False),
    "Lanczos": ViTImageProcessorPil(size={"height": 32, "width": 32}, resample=1),
    "ConvNeXT": ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    "ConvNeXT of 384": ConvNextImageProcessorPil(size={"shortest_edge": 384}),
    "not rescaled": ViTImageProcessorPil(size={"height": 32, "width": 32}, do_rescale=False),
}
ORIENTATION = 0x0112


def photograph(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth light, shapes with sharp edges, fine lines and some noise."""
    dice = np.random.default_rng(seed)
    coarse = Image.fromarray(dice.integers(40, 216, (5, 6, 3), dtype=np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top, right, bottom = dice.integers(-20, max(width, height) + 20, 4).tolist()
        box = [min(left, right), min(top, bottom), max(left, right), max(top, bottom)]
        colour = tuple(dice.integers(0, 256, 3).tolist())
        (draw.ellipse if dice.random() < 0.5 else draw.rectangle)(box, outline=colour, width=max(1, width // 60))
        draw.line([left, top, right, bottom], fill=colour, width=1 + width // 200)
    noisy = np.asarray(image) + dice.normal(0, 4, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def files(width: int, height: int) -> dict[str, bytes]:
    """One picture in the forms that photographs have."""
    picture = photograph(width, height, width)
    clear = picture.copy()
    clear.putalpha(photograph(width, height, 1, "L"))
    made = {
        "JPEG": encoded(picture, "JPEG", quality=90),
        "progressive": encoded(picture, "JPEG", quality=85, progressive=True, subsampling=0),
        "grey": encoded(picture.convert("L"), "JPEG"),
        "CMYK": encoded(picture.convert("CMYK"), "JPEG"),
        "PNG": encoded(picture),
        "palette": encoded(picture.quantize(64)),
        "transparent": encoded(clear),
        "WebP": encoded(picture, "WEBP", quality=80),
    }
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        made[f"orientation {orientation}"] = encoded(picture, "JPEG", quality=90, exif=exif)
    return made


@functools.cache
def fast(model: str) -> ImageInputs:
    return ImageInputs(PROCESSORS[model])


def exact(inputs: ImageInputs) -> ImageTransform:
    assert inputs.transform is not None
    return replace(inputs.transform, fast=False)


def prepared(inputs: Any, value: object) -> NDArray[np.float32]:
    [ready] = inputs.prepare([value])
    assert isinstance(ready, Prepared), ready
    return ready.payload


def outcome(transform: ImageTransform, value: object) -> NDArray[np.uint8] | str:
    try:
        return transform(value)
    except RecordError as error:
        return str(error)


@pytest.mark.parametrize("model", PROCESSORS)
def test_the_exact_way_has_the_pixels_of_the_processor(model: str) -> None:
    """That of images as they are decoded: tests of modes compare whole files."""
    inputs = ImageInputs(PROCESSORS[model], pixels="exact")
    assert inputs.transform is not None
    for size in SIZES[:5]:
        picture = photograph(*size)
        wanted = PROCESSORS[model](images=picture, return_tensors="np")["pixel_values"][0]
        found = prepared(inputs, encoded(picture))
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_fast_way_has_nearly_the_pixels_of_the_exact_way(size: tuple[int, int]) -> None:
    lossless = {"PNG", "palette", "transparent", "WebP", "CMYK"}
    contents = files(*size)
    scaled = 0
    for model in PROCESSORS:
        inputs = fast(model)
        assert inputs.transform is not None and inputs.transform.fast
        for name, content in contents.items():
            found, wanted = inputs.transform(content), exact(inputs)(content)
            assert found.shape == wanted.shape == (*(inputs.transform.shape or ()), 3), (model, name)
            assert found.dtype == np.uint8
            difference = np.abs(found.astype(int) - wanted)
            assert difference.max() <= (2 if name in lossless else 12), (model, name)
            assert difference.mean() <= (0.1 if name in lossless else 0.5), (model, name)
            scaled += name == "JPEG" and difference.mean() > 0.02
    assert bool(scaled) == (min(size) >= 2 * 4 * 32)  # at a fraction of their size, JPEG files do differ


def test_a_large_jpeg_file_is_decoded_at_a_fraction_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    own = transforms.resized_by_torch
    monkeypatch.setattr(
        transforms, "resized_by_torch", lambda image, *rest: seen.append(image.size) or own(image, *rest)
    )
    transform = ImageTransform(10_000_000, on_white=False, size=(32, 32), fast=True)
    for size in ((2049, 1025), (1024, 1500), (257, 256), (255, 400)):
        transform(encoded(photograph(*size), "JPEG"))
    assert seen == [(257, 129), (128, 188), (129, 128), (255, 400)]


def test_labels_and_vectors_are_those_of_the_processor_and_the_model(tmp_path: Path) -> None:
    folder = vision_model(tmp_path)
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    peer = AutoModelForImageClassification.from_pretrained(str(folder), dtype=torch.float32).eval()
    pictures = [photograph(320 + 61 * seed % 700, 240 + 83 * seed % 600, seed) for seed in range(40)]
    contents = [encoded(picture, "JPEG", quality=90) for picture in pictures]
    with torch.inference_mode():
        pixels = processor(images=[Image.open(io.BytesIO(one)) for one in contents], return_tensors="pt")
        made = peer(**pixels, output_hidden_states=True)
        vectors = peer.vit.layernorm(made.hidden_states[-1])[:, 0].numpy()
    labels = [peer.config.id2label[one] for one in made.logits.argmax(1).tolist()]
    classifier = create("image-classify", folder, device="cpu")
    assert classifier.describe()["pixels"] == "auto"
    found = classifier.forward(classifier.prepare_column(contents).payloads)
    assert [one["label"] for one in found] == labels
    assert len(set(labels)) > 1
    embedder = create("image-embed", folder, device="cpu")
    ours = np.stack(embedder.forward(embedder.prepare_column(contents).payloads))
    cosines = (ours * vectors).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(vectors, axis=1)
    assert cosines.min() >= 0.999


def test_a_bad_file_fails_for_the_same_reason_in_both_ways() -> None:
    inputs = fast("ViT")
    assert inputs.transform is not None
    dice = np.random.default_rng(0)
    refused = 0
    for whole in (files(300, 260)["JPEG"], files(640, 480)["progressive"], files(300, 260)["orientation 6"]):
        cut = [whole[: len(whole) * share // 20] for share in range(1, 20)]
        for _ in range(60):
            damaged = bytearray(whole)
            for place in dice.integers(0, len(whole) if dice.random() < 0.5 else 700, 3):
                damaged[place] = dice.integers(0, 256)
            cut.append(bytes(damaged))
        for content in cut:
            found, wanted = outcome(inputs.transform, content), outcome(exact(inputs), content)
            assert isinstance(found, str) == isinstance(wanted, str)
            if isinstance(wanted, str):
                assert found == wanted
                refused += 1
    assert refused > 50
    limited = replace(inputs.transform, max_pixels=2000)
    for bad in (b"", None, "/no/such/image.png", files(64, 48)["JPEG"], encoded(Image.new("1", (20_000, 20_000)))):
        found, wanted = outcome(limited, bad), outcome(replace(limited, fast=False), bad)
        assert isinstance(found, str) and found == wanted


def test_a_file_with_the_wrong_extension_is_read_by_its_content(tmp_path: Path) -> None:
    inputs = fast("ViT")
    content = files(64, 48)["JPEG"]
    (tmp_path / "photo.png").write_bytes(content)
    assert inputs.transform is not None
    assert (inputs.transform(str(tmp_path / "photo.png")) == inputs.transform(content)).all()


def test_the_fast_way_is_used_only_if_test_images_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = PROCESSORS["CLIP"]
    assert ImageInputs(processor).describe() == {"max_pixels": 89_478_485, "pixels": "auto"}
    assert ImageInputs(processor, pixels="exact").describe() == {"max_pixels": 89_478_485}
    own = transforms.resized_by_torch
    with monkeypatch.context() as patch:
        patch.setattr(transforms, "resized_by_torch", lambda *all: np.minimum(own(*all), 250) + 2)
        inputs = ImageInputs(processor)
        assert inputs.transform is not None and not inputs.transform.fast
        assert "pixels" not in inputs.describe()
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_spec", lambda name: None)
        inputs = ImageInputs(processor)
        assert inputs.transform is not None and not inputs.transform.fast
    with monkeypatch.context() as patch:
        blurred = ImageTransform.decoded_small
        patch.setattr(ImageTransform, "decoded_small", lambda self, file: blurred(self, file)[::-1])
        inputs = ImageInputs(processor)
        assert inputs.transform is not None and not inputs.transform.fast


def test_without_arrow_and_in_several_pieces_an_image_has_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = ImageTransform(100_000_000, on_white=False, size=(32, 32), fast=True)
    small, large = encoded(photograph(200, 150)), encoded(Image.new("RGB", (2300, 2200), (200, 100, 50)))
    lent = transforms._values_of(photograph(200, 150))
    assert lent.shape == (150, 200, 4)
    with Image.open(io.BytesIO(large)) as image:
        image.load()
        assert transforms._values_of(image).shape == (2200, 2300, 3)
    assert (transform(large) == (200, 100, 50)).all()
    wanted = transform(small)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert (transforms._values_of(photograph(200, 150)) == lent[..., :3]).all()
    assert (transform(small) == wanted).all()


def test_a_processor_that_is_not_known_makes_the_pixels_itself() -> None:
    class Mirroring(ViTImageProcessorPil):
        def _preprocess(self, images: list[Any], **settings: Any) -> Any:
            return super()._preprocess([image[..., ::-1] for image in images], **settings)

    class Turning(ViTImageProcessorPil):
        def process_image(self, image: Any, **settings: Any) -> Any:
            return super().process_image(image, **settings)[:, ::-1]

    beit = BeitImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False)
    whole = ViTImageProcessorPil(do_resize=False)
    for processor in (Mirroring(**SMALL), Turning(**SMALL), beit, whole):
        inputs = ImageInputs(processor)
        assert inputs.transform is None and inputs.preparer is None
        assert "pixels" not in inputs.describe()
        picture = photograph(90, 70)
        wanted = processor(images=picture, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(prepared(inputs, encoded(picture)), wanted, atol=1e-6)


SMALL: dict[str, Any] = {"size": {"height": 32, "width": 32}}


def test_settings_that_do_not_say_all_are_found_by_the_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a later transformers, say, whose processors inherit another resize."""
    own = module.PilBackend.resize

    def mirrored(self: Any, image: Any, **settings: Any) -> Any:
        return own(self, image[..., ::-1], **settings)

    monkeypatch.setattr(module.PilBackend, "resize", mirrored)
    assert ImageInputs(ViTImageProcessorPil(**SMALL)).transform is None


def test_a_column_is_joined_and_taken_apart_and_has_the_same_outputs(tmp_path: Path) -> None:
    engine = create("image-embed", vision_model(tmp_path), device="cpu")
    assert engine.profile.prepares_columns
    contents = [encoded(photograph(90 + 10 * seed, 70, seed), "JPEG") for seed in range(5)]
    column = engine.prepare_column(pyarrow.array([*contents[:2], b"no image", contents[2], None]))
    assert {row: str(error).split(":")[0] for row, error in column.errors.items()} == {
        2: "the image cannot be decoded",
        4: "expected an image (a path, bytes or a data URL), got null",
    }
    assert column.costs.tolist() == [1, 1, 0, 1, 0] and column.costs.dtype == np.int64
    payloads = column.payloads
    assert isinstance(payloads, PixelColumn)
    assert (len(payloads), payloads.nbytes) == (5, 5 * 32 * 32 * 3)
    more = engine.prepare_column([contents[3], {"bytes": contents[4], "path": None}]).payloads
    batch = PixelColumn.joined([payloads.take(np.array([3, 0, 1])), more])
    singles = [one.payload for one in engine.prepare([contents[number] for number in (2, 0, 1, 3, 4)])]
    for row, single in enumerate(singles):
        assert (batch[row] == single).all()
    assert (np.stack(engine.forward(batch)) == np.stack(engine.forward(singles))).all()
    assert len(PixelColumn.joined([batch.take(np.array([], dtype=np.intp))])) == 0
    again = pickle.loads(pickle.dumps(batch))
    assert (again.values == batch.values).all() and again.normalization == batch.normalization
    assert engine.prepare_column([]).payloads.nbytes == 0


@pytest.mark.parametrize("kind", ["vit", "resnet", "clip"])
def test_pixels_are_normalised_on_a_device_to_the_same_numbers(tmp_path: Path, kind: str) -> None:
    inputs = ImageInputs(AutoImageProcessor.from_pretrained(str(vision_model(tmp_path, kind)), backend="pil"))
    assert inputs.normalization is not None and inputs.preparer is not None
    payloads = inputs.preparer.prepare_column([encoded(photograph(90, 70, seed)) for seed in range(3)]).payloads
    assert isinstance(payloads, PixelColumn)
    seen = []
    network = DeviceNormalized(
        lambda tensors: seen.append(tensors["pixel_values"]) or seen[-1],
        inputs.normalization,
        torch.float32,
        torch.device("cpu"),
    )
    network({RAW_PIXELS: torch.from_numpy(payloads.values)})
    assert (seen[0].numpy() == inputs.normalization(payloads.values)).all()
    network({"pixel_values": seen[0]})
    assert seen[1] is seen[0]


def test_every_grade_is_normalised_as_by_the_processor() -> None:
    grades = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    wanted = processor(images=Image.fromarray(grades), return_tensors="np")["pixel_values"][0]
    inputs = ImageInputs(processor)
    assert inputs.normalization is not None
    assert (inputs.normalization(grades) == wanted).all()
    assert Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))(grades).max() == 255


def test_blocks_are_prepared_in_other_processes_without_a_model(tmp_path: Path) -> None:
    engine = create("image-embed", vision_model(tmp_path, "clip"), device="cpu", pixels="exact")
    contents = [files(301, 517)["PNG"], b"no image"]
    code = (
        "import pickle, sys\n"
        "preparer, contents = pickle.load(sys.stdin.buffer)\n"
        "made = preparer.prepare_column(contents)\n"
        "pickle.dump((made, {'torch', 'transformers'} & set(sys.modules)), sys.stdout.buffer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((engine.preparer, contents)),
        stdout=subprocess.PIPE,
        check=True,
    )
    found, loaded = pickle.loads(done.stdout)
    wanted = engine.prepare_column(contents)
    assert (found.payloads.values == wanted.payloads.values).all()
    assert (
        repr(found.errors)
        == repr(wanted.errors)
        == ("{1: RecordError('the image cannot be decoded: cannot identify image file')}")
    )
    assert loaded == set()
