"""Speed up text encoders without changing their outputs: unpadded attention and prepacked weights.

Both patch other libraries' models and do not work for every model. Each is tried on a few texts when a model is
loaded, and undone if it fails or the outputs differ.
"""

from __future__ import annotations

import functools

import torch
from transformers import PretrainedConfig, PreTrainedModel

from headrace.engines.networks.prepacking import UNFIT, keep_if_equal, prepack, unpack
from headrace.engines.networks.pytorch import TOLERANCE, known_mask
from headrace.engines.text import packing

_LEAST_WIDTH = 256
"""Minimum hidden size. In smaller models, many small attention calls cost more than the padding they save."""

_LENGTHS = (160, 7, 3, 7, 1)
"""Token counts of the test texts; the longest exceeds usual attention windows."""

_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest text of a batch."""

_ENCODERS = ("encoder", "transformer")
"""Attribute names of the module that holds all layers."""


def tune(model: torch.nn.Module) -> list[str]:
    """Optimise a loaded model in place where its outputs stay the same; returns the names of the changes kept."""
    if not isinstance(model, PreTrainedModel):
        return []  # for example an adapter around one
    base = model.base_model
    if getattr(model.config, "hidden_size", 0) < _LEAST_WIDTH or model.dtype not in TOLERANCE:
        return []
    states = functools.partial(_states, base)
    try:
        expected = states()
    except UNFIT:
        return []  # it does not take texts
    changes = {"prepacked": (prepack, unpack), "packed": (_pack, _pad)}
    return [name for name, change in changes.items() if keep_if_equal(*change, base, states, expected)]


def is_packed(model: torch.nn.Module) -> bool:
    """Whether `tune` has made a model of transformers run without padding. It may be called on several threads at once;
    a model's own code may not."""
    packed = [part for part in model.modules() if isinstance(part, packing.PackedEncoder)]
    return any(type(part.encoder).__module__.startswith("transformers.") for part in packed)


def restore(model: PreTrainedModel) -> None:
    """Undo `tune`, for tools that read a model, such as an export."""
    _pad(model.base_model)
    unpack(model.base_model)


def by_length(model: torch.nn.Module) -> bool:
    """Whether a model computes long batches differently from short ones, so that lengths must not be mixed.

    BigBird does, and never switches back from full attention by itself; this patches it to switch per batch.
    """
    base = getattr(model, "base_model", model)
    config: PretrainedConfig | None = getattr(base, "config", None)
    if (
        config is not None
        and getattr(config, "attention_type", None) == "block_sparse"
        and hasattr(base, "set_attention_type")
    ):
        shortest = (5 + 2 * config.num_random_blocks) * config.block_size + 1

        forward = base.forward  # patched directly: some callers bypass module hooks

        @functools.wraps(forward)
        def as_loaded(input_ids: torch.Tensor, *args: object, **others: object) -> object:
            if input_ids.shape[1] >= shortest:
                base.set_attention_type("block_sparse")
            return forward(input_ids, *args, **others)

        base.forward = as_loaded
        return True
    return any(kind in _ROPE_BY_LENGTH for kind in _rope_types(getattr(config, "rope_parameters", None)))


def _rope_types(parameters: object) -> list[object]:
    """The rotary embedding types of a model, which may have one per layer type."""
    if not isinstance(parameters, dict):
        return []
    return [parameters.get("rope_type"), *(kind for part in parameters.values() for kind in _rope_types(part))]


def _states(base: PreTrainedModel) -> torch.Tensor:
    """The hidden states of all real tokens of fixed test texts; float32."""
    config = base.config
    positions = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    lengths = torch.tensor([min(length, positions - 2) for length in _LENGTHS])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape) * 7919 % config.vocab_size
    ids[ids == config.pad_token_id] += 1
    ids[~mask] = config.pad_token_id or 0
    with torch.inference_mode(), known_mask(mask.numpy()):
        output = base(input_ids=ids.to(base.device), attention_mask=mask.long().to(base.device))
    states: torch.Tensor = output.last_hidden_state[mask.to(base.device)].float()
    return states


def _pack(base: PreTrainedModel) -> bool:
    """Run the model's encoder module without padding, if it uses PyTorch's SDPA."""
    name = next((one for one in _ENCODERS if isinstance(getattr(base, one, None), torch.nn.Module)), None)
    if name is None or base.config._attn_implementation != "sdpa":
        return False
    if base.config.output_hidden_states:
        return False  # the shape of each layer's output would differ from the batch's
    packing.register()
    base.set_attn_implementation(packing.NAME)
    setattr(base, name, packing.PackedEncoder(getattr(base, name)))
    return True


def keep_padding(model: torch.nn.Module) -> None:
    """Undo the part of `tune` that leaves out padding, for inputs that hold tokens which nothing attends to."""
    if isinstance(model, PreTrainedModel):
        _pad(model.base_model)


def _pad(base: PreTrainedModel) -> None:
    for name in _ENCODERS:
        encoder = getattr(base, name, None)
        if isinstance(encoder, packing.PackedEncoder):
            setattr(base, name, encoder.encoder)
            base.set_attn_implementation("sdpa")
