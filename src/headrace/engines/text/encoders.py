"""Speed up text encoders without changing their outputs: unpadded attention and prepacked weights.

Both patch other libraries' models and do not work for every model. Each is tried on a few texts when a model is
loaded, and undone if it fails or the outputs differ.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation

from headrace.engines.networks.pytorch import TOLERANCE, known_mask
from headrace.engines.text import packing

_LEAST_WIDTH = 256
"""Minimum hidden size. In smaller models, many small attention calls cost more than the padding they save."""

_LENGTHS = (160, 7, 3, 7, 1)
"""Token counts of the test texts; the longest exceeds usual attention windows."""

# Errors that libraries raise for models with an unexpected structure.
_UNFIT = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)

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
    try:
        expected = _states(base)
    except _UNFIT:
        return []  # it does not take texts
    changes = {"prepacked": (_prepack, unpack_weights), "packed": (_pack, _pad)}
    return [name for name, (change, undo) in changes.items() if _stays(change, undo, base, expected)]


def restore(model: PreTrainedModel) -> None:
    """Undo `tune`, for tools that read a model, such as an export."""
    _pad(model.base_model)
    unpack_weights(model.base_model)


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


def _stays(
    change: Callable[[PreTrainedModel], bool],
    undo: Callable[[PreTrainedModel], None],
    base: PreTrainedModel,
    expected: torch.Tensor,
) -> bool:
    if not change(base):
        return False
    try:
        found = _states(base)
    except _UNFIT:
        undo(base)
        return False
    room = TOLERANCE[base.dtype] * float(expected.abs().max())
    if found.shape == expected.shape and float((found - expected).abs().max()) <= room:  # never with NaN
        return True
    undo(base)
    return False


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


class PrepackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """A linear layer with weights in oneDNN's memory layout, so that oneDNN need not reorder them for each batch.

    In BERT-like models, a GELU that follows is fused into it.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()
        self.gelu: tuple[torch.nn.Module, ...] = ()
        """The fused activation, if any. In a tuple, so that it is not registered as a submodule."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The layer's output, with the fused activation if any."""
        name, way = ("gelu", "none") if self.gelu else ("none", "")  # by the error function
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed_weight, self._bias, name, [], way)
        return output

    def linear(self) -> torch.nn.Linear:
        """The original layer."""
        weight = self.packed_weight.to_dense()
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=self._bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(weight)
        if self._bias is not None:
            layer.bias = torch.nn.Parameter(self._bias)
        return layer.eval()


def _prepack(base: PreTrainedModel) -> bool:
    """Prepack the linear layers of a float32 model on an x86 CPU."""
    if base.device.type != "cpu" or base.dtype != torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    _exchange(base, torch.nn.Linear, PrepackedLinear)
    for part in base.modules():
        if type(getattr(part, "intermediate_act_fn", None)) is GELUActivation and hasattr(part, "dense"):
            part.dense.gelu, part.intermediate_act_fn = (part.intermediate_act_fn,), torch.nn.Identity()
    return True


def unpack_weights(base: PreTrainedModel) -> None:
    """Undo the prepacking of linear layers."""
    for part in base.modules():
        dense = getattr(part, "dense", None)
        if type(dense) is PrepackedLinear and dense.gelu:
            [part.intermediate_act_fn] = dense.gelu
    _exchange(base, PrepackedLinear, PrepackedLinear.linear)


def _exchange(base: PreTrainedModel, kind: type, make: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Replace all submodules of exactly this type."""
    for parent in list(base.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))
