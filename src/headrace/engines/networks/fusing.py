"""Layers that a GPU computes in fewer kernels, for encoders of texts and vision transformers in 16 bits.

A sum and the LayerNorm after it are one kernel, and a GELU is part of the matrix product before it. That GELU is the
one by tanh (https://arxiv.org/abs/1606.08415): for most inputs, the difference is below what 16 bits resolve. A
library's model is changed in place. The change is undone if it fails, or gives other outputs.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel
from transformers.activations import GELUActivation

from headrace.device.native import has_kernels
from headrace.engines.networks.packing import HALVES
from headrace.engines.networks.prepacking import ACTIVATED

_WIDEST = 8_192
"""The most components that a program normalises."""


class FusedNorm(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """LayerNorm in one kernel."""

    def __init__(self, norm: torch.nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The normalised sum of both, or the first alone."""
        from headrace.device.kernels import add_norm  # Triton is not there for every device

        found: torch.Tensor = add_norm(states, residual, self.norm.weight, self.norm.bias, self.norm.eps)
        return found


class FusedOutput(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """The linear layer of a BERT-like model, and the LayerNorm of its output plus a residual."""

    def __init__(self, output: torch.nn.Module) -> None:
        super().__init__()
        self.original = (output,)  # in a tuple, so that its parameters are not registered twice
        self.dense = output.dense
        self.norm = FusedNorm(output.LayerNorm)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.dense(hidden_states), input_tensor)
        return found


class FusedGelu(torch.nn.Module):  # type: ignore[misc]  # torch's types are not read here
    """A linear layer and the GELU of its output, in one matrix product."""

    def __init__(self, linear: torch.nn.Linear, gelu: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.gelu = (gelu,)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        flat = states.reshape(-1, states.shape[-1])
        found = torch._addmm_activation(self.linear.bias, flat, self.linear.weight.t(), use_gelu=True)
        return found.view(*states.shape[:-1], -1)


def can_fuse(base: PreTrainedModel) -> bool:
    """Whether there are kernels for the model's device and dtype."""
    return base.dtype in HALVES and has_kernels(base.device)


def fuse(base: PreTrainedModel) -> bool:
    """Exchange the layers of a model. Returns whether it could."""
    if not can_fuse(base):
        return False
    exchange(base)
    return True


def exchange(base: PreTrainedModel) -> None:
    """Exchange the layers, whatever the device."""
    exchanged: set[torch.nn.Module] = set()
    for parent in list(base.modules()):
        for name, child in () if parent in exchanged else parent.named_children():
            if _adds_and_normalises(child):
                setattr(parent, name, FusedOutput(child))
                exchanged.add(child)
            elif _normalises(child):
                setattr(parent, name, FusedNorm(child))
        for linear, activation in ACTIVATED.items():
            gelu, layer = getattr(parent, activation, None), getattr(parent, linear, None)
            is_linear = layer is not None and type(layer) is torch.nn.Linear and layer.bias is not None
            if is_linear and type(gelu) is GELUActivation:
                setattr(parent, linear, FusedGelu(layer, gelu))
                setattr(parent, activation, torch.nn.Identity())


def unfuse(base: PreTrainedModel) -> None:
    """Undo `exchange`."""
    for parent in list(base.modules()):
        for name, child in parent.named_children():
            if isinstance(child, FusedOutput):
                setattr(parent, name, *child.original)
            elif isinstance(child, FusedNorm) and not isinstance(parent, FusedOutput):
                setattr(parent, name, child.norm)
        for linear, activation in ACTIVATED.items():
            layer = getattr(parent, linear, None)
            if isinstance(layer, FusedGelu):
                setattr(parent, activation, *layer.gelu)
                setattr(parent, linear, layer.linear)


def _normalises(part: torch.nn.Module) -> bool:
    return (
        type(part) is torch.nn.LayerNorm
        and len(part.normalized_shape) == 1
        and part.weight is not None
        and (part.normalized_shape[0] <= _WIDEST)
    )


def _adds_and_normalises(part: torch.nn.Module) -> bool:
    """Whether it is a linear layer and the norm of its sum with what went in, as BERT-like models have them."""
    if not (type(getattr(part, "dense", None)) is torch.nn.Linear and _normalises(getattr(part, "LayerNorm", part))):
        return False
    return list(inspect.signature(part.forward).parameters) == ["hidden_states", "input_tensor"]
