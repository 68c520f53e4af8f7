"""Classify and embed images with vision models on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import ModelOutput

from headrace.device.pipeline import NetworkCall
from headrace.engines.model_folder import find_folder
from headrace.engines.networks import cpu_attention
from headrace.engines.networks.fusing import can_fuse, fuse, unfuse
from headrace.engines.networks.prepacking import UNFIT, can_prepack, keep_if_equal, prepack, unpack
from headrace.engines.networks.pytorch import TorchNetwork, load_pretrained
from headrace.engines.vision.images import ImageInputs, images_for
from headrace.engines.vision.options import ImageClassification, ImageEmbedding
from headrace.engines.vision.pixels import Normalization
from headrace.engines.vision.tasks import RAW_PIXELS, ImageEngine, image_classifier, image_embedder
from headrace.errors import EngineError, RecordError


def image_classify(options: ImageClassification) -> ImageEngine:
    folder = find_folder(options.model)
    module, place, missing = load_pretrained(AutoModelForImageClassification, folder, options.device, options.dtype)
    if missing:
        raise EngineError(
            f"the model in {folder} is not an image classifier: its weights lack {', '.join(sorted(missing)[:3])}"
        )
    images = images_for(folder, options.max_pixels, options.pixels)
    network = _network(folder, module, place, _logits, images)
    return image_classifier(network, images, module.config.to_dict(), options.top_labels)


def image_embed(options: ImageEmbedding) -> ImageEngine:
    """Embed images: a CLIP-like model's image features, else the model's pooled output, else its first token."""
    folder = find_folder(options.model)
    module, place, missing = load_pretrained(AutoModel, folder, options.device, options.dtype)
    # A pooling layer without weights, as in a classifier's folder, would return random numbers.
    unpooled = {name for name in missing if "pooler" in name.split(".")}
    if missing - unpooled:
        raise EngineError(f"the model in {folder} is incomplete: it lacks {', '.join(sorted(missing - unpooled)[:3])}")
    vectors = _features if hasattr(module, "get_image_features") else partial(_vectors, pooled=not unpooled)
    images = images_for(folder, options.max_pixels, options.pixels)
    return image_embedder(_network(folder, module, place, vectors, images), images)


def _network(
    folder: Path,
    module: PreTrainedModel,
    place: torch.device,
    rows: Callable[[PreTrainedModel, Mapping[str, torch.Tensor]], torch.Tensor],
    images: ImageInputs,
) -> TorchNetwork:
    """The network that returns `rows`, made faster where it gives the same outputs."""
    call = partial(rows, module.to(memory_format=torch.channels_last))
    speed_up(module, call, images)
    inputs = frozenset({"pixel_values"})
    if place.type == "cpu" or images.normalization is None:
        network = TorchNetwork(folder, module, place, call, inputs)
    else:
        normalized = DeviceNormalized(call, images.normalization, module.dtype, place)
        network = TorchNetwork(folder, module, place, normalized, inputs | {RAW_PIXELS})
    network.allow_parts()
    return network


class DeviceNormalized:
    """Calls a network with pixels that come in 8 bits: the device normalises them, with the processor's arithmetic."""

    def __init__(
        self, call: NetworkCall, normalization: Normalization, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._call = call
        self._dtype = dtype
        self._scale = normalization.scale
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device)
            for values in (normalization.mean, normalization.std)
        )

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The network's output for `raw_pixels` of shape (images, height, width, 3), or for `pixel_values`."""
        raw = tensors.get(RAW_PIXELS)
        if raw is not None:
            values = raw.double().mul_(self._scale).float().sub_(self._mean).div_(self._std)
            tensors = {"pixel_values": values.permute(0, 3, 1, 2).to(self._dtype)}
        return self._call(tensors)


def speed_up(module: PreTrainedModel, call: NetworkCall, images: ImageInputs) -> None:
    """Prepack linear layers and choose an attention, or fuse layers on a GPU, where `call` then returns the same for a
    test image."""
    changes: list[tuple[Callable[[PreTrainedModel], bool], Callable[[PreTrainedModel], None]]]
    if can_fuse(module.base_model):
        changes = [(fuse, unfuse)]
    elif can_prepack(module.base_model):
        changes = [(prepack, unpack), (cpu_attention.use, cpu_attention.undo)]
    else:
        return
    device = module.device

    def outputs() -> torch.Tensor:
        with torch.inference_mode():
            return call({"pixel_values": torch.from_numpy(images.sample()[None]).to(device, module.dtype)}).float()

    try:
        expected = outputs()
    except (*UNFIT, RecordError):
        return  # it does not take this image
    for change, undo in changes:
        keep_if_equal(change, undo, module.base_model, outputs, expected)


def _run(method: Callable[..., ModelOutput], tensors: Mapping[str, torch.Tensor]) -> ModelOutput:
    return method(pixel_values=tensors["pixel_values"].to(memory_format=torch.channels_last))


def _logits(module: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits: torch.Tensor = _run(module, tensors).logits
    return logits


def _features(module: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    features = _run(module.get_image_features, tensors)
    vectors: torch.Tensor = features if isinstance(features, torch.Tensor) else features.pooler_output
    return vectors


def _vectors(module: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, pooled: bool) -> torch.Tensor:
    output = _run(module, tensors)
    pooler: torch.Tensor | None = getattr(output, "pooler_output", None)
    if pooled and pooler is not None:
        return pooler.flatten(1)
    states: torch.Tensor = output.last_hidden_state
    return states[:, 0] if states.ndim == 3 else states.flatten(2).mean(2)
