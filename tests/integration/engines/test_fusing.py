"""Layers fused for a GPU, computed by PyTorch in place of the kernels."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels import by_pytorch
from transformers import (
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)

from headrace.engines.networks import fusing
from headrace.engines.networks.prepacking import keep_if_equal

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
MODELS = {
    "BERT": (BertConfig, BertModel, {"FusedNorm": 5, "FusedOutput": 4, "FusedGelu": 2}),
    "RoBERTa": (RobertaConfig, RobertaModel, {"FusedNorm": 5, "FusedOutput": 4, "FusedGelu": 2}),
    "MPNet": (MPNetConfig, MPNetModel, {"FusedNorm": 5, "FusedOutput": 2, "FusedGelu": 2}),
    "ViT": (ViTConfig, ViTModel, {"FusedNorm": 5, "FusedOutput": 0, "FusedGelu": 2}),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config, kind, _ = MODELS[name]
    return kind(config(**SIZES)).eval().to(torch.bfloat16)


def outputs(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    if isinstance(model, ViTModel):
        given = {"pixel_values": torch.randn(1, 3, 224, 224).bfloat16()}
    else:
        given = {"input_ids": torch.randint(5, 900, (2, 7))}
    with torch.inference_mode():
        return model(**given).last_hidden_state.float()


@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_give_the_same_and_can_be_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    model = model_of(name)
    expected, keys = outputs(model), list(model.state_dict())
    fusing.exchange(model)
    kinds = Counter(type(part).__name__ for part in model.modules())
    assert {kind: kinds[kind] for kind in MODELS[name][2]} == MODELS[name][2]
    ran: Counter[str] = Counter()
    for part in model.modules():
        part.register_forward_hook(lambda module, *_: ran.update([type(module).__name__]))
    found = outputs(model)
    assert {kind: ran[kind] for kind in MODELS[name][2]} == MODELS[name][2]
    if torch.__version__.split("+")[0] != "2.11.0":  # which rounds ViT to the same bits
        assert not torch.equal(found, expected)  # it is another computation
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
    fusing.unfuse(model)
    assert torch.equal(outputs(model), expected)
    assert list(model.state_dict()) == keys


def test_layers_are_fused_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    model = model_of("BERT")
    assert not fusing.fuse(model), "no kernels on a CPU"
    monkeypatch.setattr(fusing, "has_kernels", lambda device: True)
    assert fusing.fuse(model)
    fusing.unfuse(model)
    assert not fusing.can_fuse(model.float()), "in float32, the GELU by tanh would be another function"


FAULTS = [RuntimeError("a kernel cannot be made"), subprocess.CalledProcessError(1, "gcc"), PermissionError("cache")]
FAULTS += [AssertionError("libcuda.so cannot found!"), ImportError("libtriton.so")]


@pytest.mark.parametrize("fault", [*FAULTS, "is wrong"], ids=repr)
def test_a_kernel_that_fails_or_is_wrong_is_not_used(fault: Exception | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    monkeypatch.setattr(fusing, "has_kernels", lambda device: True)

    def broken(x: torch.Tensor, *others: Any) -> torch.Tensor:
        if isinstance(fault, Exception):
            raise fault
        return x * 2

    model = model_of("BERT")
    expected = outputs(model)
    monkeypatch.setattr(by_pytorch, "add_norm", broken)
    assert not keep_if_equal(fusing.fuse, fusing.unfuse, model, lambda: outputs(model), expected)
    assert torch.equal(outputs(model), expected)


def test_a_change_is_tried_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on the current device: on another one than their tensors, CUDA ends the process."""
    current, seen = [torch.device("cuda:0")], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def outputs() -> torch.Tensor:
        seen.append(current[-1])
        return torch.ones(2)

    monkeypatch.setattr(torch.cuda, "device", on)
    base: Any = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.bfloat16)
    assert keep_if_equal(lambda _: True, lambda _: None, base, outputs, torch.ones(2))
    assert seen == [base.device]
