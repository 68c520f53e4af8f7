"""Labels and vectors of images are transformers' own, and every kind of image file is handled or refused alone."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tests.small_models import encoded, picture, vision_model
from transformers import AutoConfig, AutoModel, ViTModel, pipeline
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from headrace.engines.base import Prepared
from headrace.engines.choosing.registry import create
from headrace.engines.networks import cpu_attention
from headrace.engines.networks.prepacking import PrepackedLinear
from headrace.errors import ConfigError, RecordError

SIZES = [(40, 30), (31, 64), (32, 32), (7, 9), (200, 33), (1, 1), (3, 3)]
UPRIGHT = picture(64, 32)
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return create("image-classify", vision_model(tmp_path_factory.mktemp("vit")), device="cpu")


def pixels(engine: Any, value: Any) -> np.ndarray[Any, Any]:
    [ready] = engine.prepare([value])
    assert isinstance(ready, Prepared), ready
    assert ready.cost == 1
    return np.asarray(ready.payload)


def refusal(engine: Any, value: Any) -> str:
    [ready] = engine.prepare([value])
    assert isinstance(ready, RecordError), ready
    return str(ready)


def outputs(engine: Any, inputs: Sequence[Any]) -> list[Any]:
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return list(engine.forward([one.payload for one in ready]))


def test_the_weights_of_a_vision_model_are_prepacked_if_its_outputs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_model(tmp_path)

    def prepacked() -> list[PrepackedLinear]:
        engine = create("image-classify", folder, device="cpu")
        return [part for part in engine.network.module.modules() if isinstance(part, PrepackedLinear)]

    assert any(part.gelu for part in prepacked())
    own = PrepackedLinear.forward
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, states: own(self, states) * 1.01)
    assert prepacked() == []


def test_the_attention_of_a_vision_model_is_replaced_in_sixteen_bits_if_its_outputs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_model(tmp_path)
    # A CPU without bfloat16 keeps its attention, as it would be slower in any other way.
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)

    def attention(dtype: str) -> str:
        engine = create("image-classify", folder, device="cpu", dtype=dtype)
        return str(engine.network.module.config._attn_implementation)

    assert attention("bfloat16") == cpu_attention.NAME
    assert attention("float32") == "sdpa"
    own = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", lambda *args: own(*args) * 2)
    assert attention("bfloat16") == "sdpa"
    monkeypatch.setattr(cpu_attention, "attend", own)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert attention("bfloat16") == "sdpa"


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_the_same_labels_and_scores_as_the_pipeline(tmp_path: Path, kind: str) -> None:
    folder = vision_model(tmp_path, kind)
    images = [picture(*size, seed=seed) for seed, size in enumerate(SIZES[:5])]
    peer = pipeline("image-classification", str(folder), device="cpu", dtype=torch.float32)
    engine = create("image-classify", folder, device="cpu", top_labels=3, pixels="exact")
    for ours, theirs in zip(outputs(engine, [encoded(one) for one in images]), peer(images), strict=True):
        assert ours["labels"] == [one["label"] for one in theirs]
        assert ours["scores"] == pytest.approx([one["score"] for one in theirs], abs=1e-5)


@pytest.mark.parametrize("kind", ["vit", "resnet", "clip"])
def test_pixels_are_those_the_processor_makes_alone(tmp_path: Path, kind: str) -> None:
    """Resizing before the processor must not change what it does; an image of a pixel or three is still one."""
    folder = vision_model(tmp_path, kind)
    engine = create("image-embed", folder, device="cpu", pixels="exact")
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    for size in SIZES[:5]:
        expected = processor(images=picture(*size), return_tensors="np")["pixel_values"][0]
        assert np.abs(pixels(engine, encoded(picture(*size))) - expected).max() < 1e-6
    assert {pixels(engine, encoded(picture(*size))).shape for size in SIZES} == {(3, 32, 32)}


def test_the_small_classifier_reads_digits() -> None:
    images, digits = load_digits(return_X_y=True)
    files = [encoded(Image.fromarray((one.reshape(8, 8) * 15.9375).astype(np.uint8))) for one in images[:200]]
    labels = [one["label"] for one in outputs(create("image-classify", "digits", device="cpu"), files)]
    assert np.mean([label == str(digit) for label, digit in zip(labels, digits[:200], strict=True)]) >= 0.95


def test_a_vector_is_what_the_model_pools_and_never_from_random_weights(tmp_path: Path) -> None:
    image = encoded(picture())
    for kind in ("clip", "resnet", "vit"):
        folder = vision_model(tmp_path / kind, kind)
        engine = create("image-embed", folder, device="cpu")
        model = AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()
        tensor = torch.from_numpy(pixels(engine, image))[None]
        with torch.inference_mode():
            if kind == "clip":
                expected = model.visual_projection(model.vision_model(pixel_values=tensor).pooler_output)
            elif kind == "resnet":
                expected = model(pixel_values=tensor).pooler_output.flatten(1)
            else:  # a classifier's folder has no pooling layer: the first token's state
                expected = model(pixel_values=tensor).last_hidden_state[:, 0]
        [vector] = outputs(engine, [image])
        assert vector.dtype == np.float32
        assert np.abs(vector - expected[0].numpy()).max() < 1e-5


def test_a_trained_pooling_layer_is_used(tmp_path: Path) -> None:
    folder = vision_model(tmp_path)
    whole = ViTModel(AutoConfig.from_pretrained(str(folder))).eval()  # unlike a classifier's, with a pooling layer
    whole.save_pretrained(folder)
    engine = create("image-embed", folder, device="cpu")
    image = encoded(picture())
    with torch.inference_mode():
        expected = whole(pixel_values=torch.from_numpy(pixels(engine, image))[None]).pooler_output[0].numpy()
    assert np.abs(outputs(engine, [image])[0] - expected).max() < 1e-5


def test_an_image_comes_as_a_path_bytes_a_data_url_or_a_dataset_s_dict(engine: Any, tmp_path: Path) -> None:
    data = encoded(picture())
    (tmp_path / "an image.png").write_bytes(data)
    path = str(tmp_path / "an image.png")
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    ways = [data, bytearray(data), path, Path(path), url, {"bytes": data, "path": None}, {"bytes": None, "path": path}]
    for way in ways:
        assert (pixels(engine, way) == pixels(engine, data)).all()


def test_an_image_that_lies_on_its_side_is_turned(engine: Any) -> None:
    for orientation, turn in (
        (3, Image.Transpose.ROTATE_180),
        (6, Image.Transpose.ROTATE_90),
        (8, Image.Transpose.ROTATE_270),
    ):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        lying = UPRIGHT.transpose(turn)
        assert np.abs(pixels(engine, encoded(lying, exif=exif)) - pixels(engine, encoded(UPRIGHT))).max() < 0.05
        assert np.abs(pixels(engine, encoded(lying)) - pixels(engine, encoded(UPRIGHT))).max() > 0.3


def test_cmyk_palette_grey_and_transparency_become_rgb(engine: Any) -> None:
    plain = pixels(engine, encoded(UPRIGHT))
    grey = np.asarray(pixels(engine, encoded(UPRIGHT.convert("L"))))
    assert np.abs(pixels(engine, encoded(UPRIGHT.convert("CMYK"), "TIFF")) - plain).max() < 0.05
    assert np.abs(pixels(engine, encoded(UPRIGHT.convert("CMYK"), "JPEG", quality=98)) - plain).max() < 0.15
    assert np.abs(pixels(engine, encoded(UPRIGHT.convert("P"))) - plain).mean() < 0.15
    assert np.abs(pixels(engine, encoded(UPRIGHT.convert("RGBA"))) - plain).max() < 1e-6
    assert np.abs(pixels(engine, encoded(UPRIGHT.convert("LA"))) - grey).max() < 1e-6


def test_sixteen_bits_keep_their_brightness(engine: Any) -> None:
    eight = np.asarray(UPRIGHT.convert("L"))
    sixteen = Image.fromarray(eight.astype(np.uint16) * 256 + eight[::-1])  # the lower bytes are another picture
    assert sixteen.mode == "I;16"
    for kind in ("PNG", "TIFF"):
        assert (
            np.abs(pixels(engine, encoded(sixteen, kind)) - pixels(engine, encoded(UPRIGHT.convert("L")))).max() < 0.02
        )
    assert "pixels of 32 bits (mode F)" in refusal(engine, encoded(Image.fromarray(eight.astype(np.float32)), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_stands_for_its_first_frame(engine: Any, kind: str) -> None:
    frames = [picture(64, 32, seed=seed) for seed in range(3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
    with Image.open(io.BytesIO(moving)) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert (pixels(engine, moving) == pixels(engine, encoded(frames[0], kind, **options))).all()
    assert (pixels(engine, moving) != pixels(engine, encoded(frames[1], kind, **options))).any()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_files_are_refused_and_nothing_else_happens(engine: Any, kind: str) -> None:
    whole = encoded(picture(50, 40), kind)
    assert "cannot be decoded" in refusal(engine, whole[: len(whole) // 3])
    dice = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for place in dice.integers(0, min(len(whole), 300), 3):
            damaged[place] = dice.integers(0, 256)
        [ready] = engine.prepare([bytes(damaged)])
        assert isinstance(ready, Prepared | RecordError)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "cannot be decoded"),
        (b"GIF89a", "cannot be decoded"),
        ("/no/such/image.png", "there is no image file '/no/such/image.png'"),
        ("data:image/png;base64,%%%", "data URL is not base64"),
        ("", "expected an image (a path, bytes or a data URL), got str"),
        (None, "got null"),
        ({"bytes": None, "path": None}, "got null"),
        (7, "got int"),
        ("/", "cannot be decoded"),
    ],
)
def test_what_is_no_image_says_so(engine: Any, value: Any, words: str) -> None:
    assert words in refusal(engine, value)


def test_a_bomb_is_refused_before_it_is_decoded(engine: Any, tmp_path: Path) -> None:
    bomb = encoded(Image.new("1", (20_000, 20_000)))  # 400 megapixels in some kilobytes
    assert len(bomb) < 100_000
    assert "too large" in refusal(engine, bomb)
    small = create("image-classify", vision_model(tmp_path), device="cpu", max_pixels=1000)
    assert "40 × 30 pixels, more than max_pixels 1000" in refusal(small, encoded(picture(40, 30)))
    with pytest.raises(ConfigError, match=r"max_pixels is 0; it must be >= 1"):
        create("image-classify", vision_model(tmp_path / "again"), device="cpu", max_pixels=0)


def test_a_strip_that_resizing_would_blow_up_is_refused(tmp_path: Path) -> None:
    engine = create("image-embed", vision_model(tmp_path, "clip"), device="cpu", max_pixels=2_000_000)
    assert "too narrow: resized, 1 × 70000 becomes (32, 2240000)" in refusal(
        engine, encoded(Image.new("L", (1, 70_000)))
    )


def test_images_are_prepared_on_several_threads_at_once(engine: Any) -> None:
    files = [encoded(picture(900, 700, seed=seed), "JPEG") for seed in range(2)]
    expected = [pixels(engine, one) for one in files]
    results: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda place=place: results.update({place: engine.prepare([files[place]] * 6)}))
        for place in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        assert all((one.payload == expected[place]).all() for one in results[place])


def test_a_folder_that_says_nothing_about_images_is_refused(tmp_path: Path) -> None:
    folder = vision_model(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no preprocessor_config.json, which says how images are resized"):
        create("image-classify", folder, device="cpu")


def test_a_model_without_a_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CLIPModel.*cannot use; use the task image-embed"):
        create("image-classify", vision_model(tmp_path, "clip"), device="cpu")
