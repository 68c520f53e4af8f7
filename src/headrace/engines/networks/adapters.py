"""LoRA adapters as PEFT saves them, merged into a network's weights when it is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from headrace.engines.model_folder import adapter_config
from headrace.errors import ConfigError
from headrace.records import Json
from headrace.wording import shown

_PREFIX = "base_model.model."
_HALF = re.compile(r"(.*)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_UNKNOWN = ("use_dora", "use_qalora", "lora_bias")
"""Kinds of LoRA whose weights mean something else."""


def merge(module: torch.nn.Module, adapter: str | Path) -> set[str]:
    """Add an adapter to the weights of a network; returns the names of the weights that it brings whole.

    Raises:
        ConfigError: it cannot be read, is no LoRA adapter, or was made for another model.
    """
    config, tensors = _opened(adapter)
    weights, whole, changed = dict(module.named_parameters()), set[str](), set[str]()
    for name in tensors:
        if "lora_" not in name:
            target = _target(module, weights, name, adapter, config)
            _check(target, tensors[name].shape, weights[target], adapter, config)
            weights[target].data.copy_(tensors[name])
            whole.add(target)
    for target, first, second, scale in _halves(module, tensors, adapter, config):
        turned = isinstance(module.get_submodule(target.removesuffix(".weight")), (torch.nn.Embedding, Conv1D))
        change = (second @ first) * scale  # in this order, as PEFT: another rounds otherwise
        change = change.T if turned else change
        _check(target, change.shape, weights[target], adapter, config)
        weights[target].data.add_(change.to(weights[target].device, weights[target].dtype))
        changed.add(target)
    _check_whole(whole, changed, set(weights), adapter, config)
    return whole


class NamedAdapters:
    """Adapters beside the weights of a network, of which each token of a forward pass has one or none.

    Args:
        module: takes hidden states of shape (1, tokens, width).
        folders: of the adapters, by name.

    Raises:
        ConfigError: as `merge`, or one changes more than linear layers.
    """

    def __init__(self, module: torch.nn.Module, folders: Mapping[str, str]) -> None:
        self._places: dict[str, torch.Tensor] = {}
        self._device = next(module.parameters()).device
        layers: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        for adapter, folder in folders.items():
            config, tensors = _opened(folder)
            whole = next((name for name in tensors if "lora_" not in name), None)
            for target, first, second, scale in _halves(module, tensors, folder, config):
                layer, weight = target.removesuffix(".weight"), module.get_parameter(target)
                if whole is not None or not isinstance(module.get_submodule(layer), torch.nn.Linear):
                    raise ConfigError(
                        f"``adapters``: {folder} changes {whole or layer}, which is no linear layer: give it alone, as "
                        "``adapter``, which adds it to the weights"
                    )
                _check(target, torch.Size((len(second), first.shape[1])), weight, folder, config)
                layers.setdefault(layer, {})[adapter] = (first.to(weight).T, (second * scale).to(weight).T)
        for layer, found in layers.items():
            module.get_submodule(layer).register_forward_hook(partial(self._add, found))

    def place(self, runs: Iterable[tuple[str | None, int]]) -> None:
        """Say which adapter each run of tokens has in the next forward passes, and how many tokens these are."""
        places: dict[str, list[int]] = {}
        start = 0
        for name, count in runs:
            if name is not None:
                places.setdefault(name, []).extend(range(start, start + count))
            start += count
        self._places = {name: torch.tensor(found, device=self._device) for name, found in places.items()}

    def _add(
        self,
        found: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        _: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> torch.Tensor:
        for name, places in self._places.items():
            if name in found:
                first, second = found[name]
                output = output.index_add(1, places, inputs[0][:, places] @ first @ second)
        return output


def _opened(adapter: str | Path) -> tuple[dict[str, Json], dict[str, torch.Tensor]]:
    """The configuration and the tensors of an adapter."""
    config = adapter_config(adapter)
    kind = next((name for name in _UNKNOWN if config.get(name)), None)
    if config.get("peft_type") != "LORA" or kind is not None:
        raise ConfigError(
            f"``adapter`` {adapter} is of the kind {kind or config.get('peft_type')}: only LoRA can be merged"
        )
    return config, _read(Path(adapter))


def _halves(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], adapter: str | Path, config: Mapping[str, Json]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    """Each weight that is changed, and its change: the second half by the first, times a scale, is added to it."""
    weights = dict(module.named_parameters())
    for name, first in tensors.items():
        half = _HALF.fullmatch(name)
        if half is None or half[2] == "B":
            continue
        target = _target(module, weights, f"{half[1]}.weight", adapter, config)
        second = tensors.get(name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B"))
        if second is None:
            raise ConfigError(f"``adapter`` {adapter} has {name}, and no lora_B for it: copy the whole folder")
        rank = _of_layer(config, half[1], "r", "rank_pattern", adapter)
        alpha = _of_layer(config, half[1], "lora_alpha", "alpha_pattern", adapter)
        if {first.shape[0], second.shape[1]} != {rank}:
            found = f"{first.shape[0]} and {second.shape[1]}"
            raise ConfigError(
                f"``adapter`` {adapter}: the halves of {half[1]} have the ranks {found}, and adapter_config.json says "
                f"{rank} with lora_alpha {alpha}: its files are of different adapters"
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield target, first.float(), second.float(), scale


def _check_whole(
    whole: set[str], changed: set[str], weights: set[str], adapter: str | Path, config: Mapping[str, Json]
) -> None:
    """Refuse an adapter whose file lacks whole weights that its configuration names and the model has.

    PEFT lists all usual names of heads: the model has one of them.
    """
    saved = config.get("modules_to_save") or []
    saved = saved if isinstance(saved, list) else [saved]
    for name in (missing := [name for name in saved if not _any_of(name, whole)]):
        if len(missing) == len(saved) or _any_of(name, weights):
            raise _lacking(adapter, f"modules_to_save {shown(name)}", f"weights of {name}")
    biases = {f"{name.removesuffix('weight')}bias" for name in changed}
    if config.get("bias") != "lora_only":
        biases = {name for name in weights if name.endswith("bias")}
    if config.get("bias") not in (None, "none") and biases & weights and not biases & whole:
        raise _lacking(adapter, f"bias {shown(config['bias'])}", "bias")


def _any_of(module: Json, weights: set[str]) -> bool:
    """Whether some of these weights are a module's of this name."""
    return any(f".{module}." in f".{name}" for name in weights)


def _lacking(adapter: str | Path, said: str, what: str) -> ConfigError:
    return ConfigError(
        f"``adapter`` {adapter}: adapter_config.json has {said}, and adapter_model.safetensors has no {what}: "
        "copy the whole folder, or take it out of the configuration"
    )


def _read(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "adapter_model.safetensors"
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"``adapter`` {folder} holds no {path.name}: save the adapter with PEFT") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"``adapter``: {path} cannot be read: {error}") from None
    if not any("lora_" in name for name in found):
        raise ConfigError(f"``adapter`` {folder} holds no LoRA weights")
    for name, tensor in found.items():
        if not tensor.float().isfinite().all():
            raise ConfigError(f"``adapter``: {name} in {path} holds NaN or infinity: train or copy the adapter again")
    return {name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor for name, tensor in found.items()}


def _target(
    module: torch.nn.Module, weights: Mapping[str, object], name: str, adapter: str | Path, config: Mapping[str, Json]
) -> str:
    """The name of the network's weight, which may be of the network within or around the adapter's."""
    inner = str(getattr(module, "base_model_prefix", "")) + "."
    for known in (name, name.removeprefix(inner), inner + name):
        if known in weights:
            return known
    raise ConfigError(f"``adapter`` {adapter} changes {name}, which the model does not have{_made_for(config)}")


def _made_for(config: Mapping[str, Json]) -> str:
    base = config.get("base_model_name_or_path")
    return ": use it with the model that it was made for" + (f", {base}" if base else "")


def _check(name: str, shape: torch.Size, weight: torch.Tensor, adapter: str | Path, config: Mapping[str, Json]) -> None:
    if shape != weight.shape:
        told = f"{'x'.join(map(str, shape))}, and the model's has {'x'.join(map(str, weight.shape))}"
        raise ConfigError(f"``adapter`` {adapter}: its {name} has the shape {told}{_made_for(config)}")


def _of_layer(config: Mapping[str, Json], layer: str, field: str, pattern: str, adapter: str | Path) -> float:
    """The number of a field, or the one that a pattern gives the layer."""
    given = config.get(pattern) or {}
    if isinstance(given, dict):
        matching = (value for key, value in given.items() if re.fullmatch(rf"(.*\.)?({key})", layer))
        given = next(matching, None) or config.get(field)
    else:
        field = pattern
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given or not math.isfinite(given):
        raise ConfigError(
            f"``adapter`` {adapter}: adapter_config.json has {field} {shown(given)} for {layer}: give the number "
            "that it was trained with"
        )
    return given
