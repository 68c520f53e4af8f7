"""Text encoders made faster for the same numbers: no padding inside, and matrices laid out for this CPU.

Both reach into other libraries, and not every model can take them. So each is tried on a few texts when a model is
loaded, and taken back where it fails or other numbers come out.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation

from headrace.engines.text import packing
from headrace.engines.torch_network import TOLERANCE

_LEAST_WIDTH = 256
"""Of hidden states. For smaller models many small calls of attention cost more than the padding they save."""

_LENGTHS = (160, 7, 3, 7, 1)
"""Of the texts that a change is tried on, in tokens; the longest is longer than the windows of models that have one."""

# What libraries raise where a model is made otherwise than they and we expect.
_UNFIT = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)

_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary positions whose frequencies follow the longest text of a batch."""

_ENCODERS = ("encoder", "transformer")
"""What models call the part that is all their layers."""


def tune(model: torch.nn.Module) -> list[str]:
    """Change a loaded model in place, as far as its outputs stay the same; says which changes stayed."""
    if not isinstance(model, PreTrainedModel):
        return []  # an adapter around one, say
    base = model.base_model
    if getattr(model.config, "hidden_size", 0) < _LEAST_WIDTH or model.dtype not in TOLERANCE:
        return []
    try:
        expected = _states(base)
    except _UNFIT:
        return []  # it takes something else than texts
    changes = {"laid_out": (_lay_out, _lay_back), "packed": (_pack, _pad)}
    return [name for name, (change, undo) in changes.items() if _stays(change, undo, base, expected)]


def restore(model: PreTrainedModel) -> None:
    """Take back what `tune` did: for tools that read a model, such as an export."""
    _pad(model.base_model)
    _lay_back(model.base_model)


def by_length(model: torch.nn.Module) -> bool:
    """Whether a model computes a long batch in another way than a short one, so that lengths must not be mixed.

    BigBird is one, and never goes back by itself from the way of short texts: from now on it does.
    """
    base = getattr(model, "base_model", model)
    config: PretrainedConfig | None = getattr(base, "config", None)
    if (
        config is not None
        and getattr(config, "attention_type", None) == "block_sparse"
        and hasattr(base, "set_attention_type")
    ):
        shortest = (5 + 2 * config.num_random_blocks) * config.block_size + 1

        forward = base.forward  # some callers do without the hooks of a module

        @functools.wraps(forward)
        def as_loaded(input_ids: torch.Tensor, *args: object, **others: object) -> object:
            if input_ids.shape[1] >= shortest:
                base.set_attention_type("block_sparse")
            return forward(input_ids, *args, **others)

        base.forward = as_loaded
        return True
    return any(kind in _ROPE_BY_LENGTH for kind in _rope_types(getattr(config, "rope_parameters", None)))


def _rope_types(parameters: object) -> list[object]:
    """The kinds of rotary positions of a model, which may have one for each kind of layer."""
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
    """The states of every real token of a few texts, made up but always the same; float32."""
    config = base.config
    positions = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    lengths = torch.tensor([min(length, positions - 2) for length in _LENGTHS])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape) * 7919 % config.vocab_size
    ids[ids == config.pad_token_id] += 1
    ids[~mask] = config.pad_token_id or 0
    with torch.inference_mode():
        output = base(input_ids=ids.to(base.device), attention_mask=mask.long().to(base.device))
    states: torch.Tensor = output.last_hidden_state[mask.to(base.device)].float()
    return states


def _pack(base: PreTrainedModel) -> bool:
    """Let an encoder with a name of its own run without padding, where PyTorch's attention is what it uses."""
    name = next((one for one in _ENCODERS if isinstance(getattr(base, one, None), torch.nn.Module)), None)
    if name is None or base.config._attn_implementation != "sdpa":
        return False
    if base.config.output_hidden_states:
        return False  # what each layer gives would be of another shape than the batch
    packing.register()
    base.set_attn_implementation(packing.NAME)
    setattr(base, name, packing.PackedEncoder(getattr(base, name)))
    return True


def _pad(base: PreTrainedModel) -> None:
    for name in _ENCODERS:
        encoder = getattr(base, name, None)
        if isinstance(encoder, packing.PackedEncoder):
            setattr(base, name, encoder.encoder)
            base.set_attn_implementation("sdpa")


class PrepackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """A linear layer whose weights lie in memory as oneDNN reads them: it need not sort them for each batch.

    Where BERT and its kin call a GELU next, oneDNN does it while the numbers are at hand.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()
        self.gelu: tuple[torch.nn.Module, ...] = ()
        """One that was called on what the layer gave, and is now done with it. A tuple, lest it be a part of this."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """What the layer gave, and its activation where it has one."""
        name, way = ("gelu", "none") if self.gelu else ("none", "")  # by the error function
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, name, [], way)
        return output

    def linear(self) -> torch.nn.Linear:
        """The layer that this was made of."""
        weight = self._weight.to_dense()
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=self._bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(weight)
        if self._bias is not None:
            layer.bias = torch.nn.Parameter(self._bias)
        return layer.eval()


def _lay_out(base: PreTrainedModel) -> bool:
    """Lay out the linear layers, where the numbers are float32 and run on an x86 CPU."""
    if base.device.type != "cpu" or base.dtype != torch.float32 or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    _exchange(base, torch.nn.Linear, PrepackedLinear)
    for part in base.modules():
        if type(getattr(part, "intermediate_act_fn", None)) is GELUActivation and hasattr(part, "dense"):
            part.dense.gelu, part.intermediate_act_fn = (part.intermediate_act_fn,), torch.nn.Identity()
    return True


def _lay_back(base: PreTrainedModel) -> None:
    for part in base.modules():
        dense = getattr(part, "dense", None)
        if type(dense) is PrepackedLinear and dense.gelu:
            [part.intermediate_act_fn] = dense.gelu
    _exchange(base, PrepackedLinear, PrepackedLinear.linear)


def _exchange(base: PreTrainedModel, kind: type, make: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Replace all parts of exactly this kind."""
    for parent in list(base.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))
