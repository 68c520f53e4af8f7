"""Linear layers with weights in oneDNN's memory layout, which models for texts and for images use on x86 CPUs.

A batch of short texts takes half of the processor time with them in float32, and 0.76 to 0.92 of it in bfloat16
(MiniLM, two cores with AVX-512). A library's model is changed in place. The change is undone if it fails, or gives
other outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.activations import GELUActivation

from headrace.device.placement import naming_device_errors
from headrace.engines.networks.pytorch import TOLERANCE
from headrace.errors import EngineOutOfMemoryError, ModelCodeError, model_code

UNFIT = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors that libraries raise for models with an unexpected structure."""

ACTIVATED = {"dense": "intermediate_act_fn", "fc1": "activation_fn"}
"""Attributes of a feed-forward block: its first linear layer, and the activation of that layer's output."""


def keep_if_equal(
    change: Callable[[PreTrainedModel], bool],
    undo: Callable[[PreTrainedModel], None],
    base: PreTrainedModel,
    outputs: Callable[[], torch.Tensor],
    expected: torch.Tensor,
) -> bool:
    """Change a model, and undo it if it then fails, or gives other outputs than expected. Returns whether it stays."""
    try:
        if not change(base):
            return False
        # Kernels are compiled here, which may want a C compiler, a header or a folder. They run on the current device.
        with model_code(), naming_device_errors(base.device, lambda: "a few test records"):
            found = outputs()
    except (*UNFIT, ModelCodeError, EngineOutOfMemoryError):
        undo(base)
        return False
    room = TOLERANCE[base.dtype] * float(expected.abs().max())
    if found.shape == expected.shape and float((found - expected).abs().max()) <= room:  # never with NaN
        return True
    undo(base)
    return False


class PrepackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """A linear layer with weights in oneDNN's memory layout, so that oneDNN need not reorder them for each batch.

    In BERT-like models and vision transformers, a GELU that follows is fused into it.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()
        self.gelu: tuple[torch.nn.Module, ...] = ()
        """The fused activation, if any. In a tuple, so that it is not registered as a submodule."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        name, way = ("gelu", "none") if self.gelu else ("none", "")  # by the error function
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed_weight, self._bias, name, [], way)
        return output

    def linear(self) -> torch.nn.Linear:
        weight = self.packed_weight.to_dense()
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=self._bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(weight)
        if self._bias is not None:
            layer.bias = torch.nn.Parameter(self._bias)
        return layer.eval()


def can_prepack(base: PreTrainedModel) -> bool:
    """Whether a model has linear layers that oneDNN computes on this CPU, in the model's dtype."""
    if base.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if base.dtype != torch.float32 and not (
        base.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return False
    return any(type(part) is torch.nn.Linear for part in base.modules())


def prepack(base: PreTrainedModel) -> bool:
    """Prepack a model's linear layers. Returns whether it could."""
    if not can_prepack(base):
        return False
    _exchange(base, torch.nn.Linear, PrepackedLinear)
    for part in base.modules():
        for linear, activation in ACTIVATED.items():
            gelu, layer = getattr(part, activation, None), getattr(part, linear, None)
            if type(gelu) is GELUActivation and isinstance(layer, PrepackedLinear):
                layer.gelu = (gelu,)
                setattr(part, activation, torch.nn.Identity())
    return True


def unpack(base: PreTrainedModel) -> None:
    """Undo the prepacking of linear layers."""
    for part in base.modules():
        for linear, activation in ACTIVATED.items():
            layer = getattr(part, linear, None)
            if isinstance(layer, PrepackedLinear) and layer.gelu:
                setattr(part, activation, *layer.gelu)
    _exchange(base, PrepackedLinear, PrepackedLinear.linear)


def _exchange(base: PreTrainedModel, kind: type, make: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Replace all submodules of exactly this type."""
    for parent in list(base.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))
