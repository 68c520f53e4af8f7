"""A forward pass on a GPU asks the device for nothing: its host would stand still, and then the device."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.engines.cases import CASES, Place
from tests.fake_cuda import DeviceWaitError, FakeCuda, FakePipeline
from tests.families import family_model
from tests.kernels import by_pytorch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedModel

import headrace
from headrace.engines.choosing.registry import create
from headrace.engines.generation import decode_graphs
from headrace.engines.generation.paged_attention import PagedModel
from headrace.engines.networks import fusing, packing, prepacking

ENCODERS = ["embed", "sparse-embed", "multi-vector-embed", "classify", "classify-pairs", "score", "zero-shot"]
ENCODERS += ["image-classify", "image-embed"]
IN_A_ROW = ["Bert", "Roberta", "Albert", "DistilBert", "Electra", "ModernBert", "EuroBert", "NomicBert"]
IN_A_ROW += ["Llama", "Qwen3", "Gemma3Text"]
PADDED = ["MPNet", "T5"]
"""DeBERTa's own code reads from the device."""


def on_gpu(engine: Any, dtype: torch.dtype) -> FakePipeline:
    """Put an engine's network on a fake GPU."""
    network, device = engine.network, FakeCuda()
    for part in network.module.modules():
        if isinstance(part, PreTrainedModel):
            prepacking.unpack(part.base_model)
            if part.config._attn_implementation == "headrace_cpu":
                part.set_attn_implementation("sdpa")
    device.move(network.module, dtype)
    network.kind, network._dtype, network._has_parts = "cuda", dtype, False
    network._pipeline = pipeline = FakePipeline(device, dtype)
    return pipeline


def forwarded(engine: Any, good: list[Any]) -> None:
    ready = engine.prepare(good)
    assert len(engine.forward([one.payload for one in ready])) == len(good)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)],
    ids=["bfloat16", "float32"],
)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_the_contract_waits_for_nothing(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    with ExitStack() as stack:
        engine = case.make(Place(tmp_path, "cpu", stack))
        pipeline = on_gpu(engine, dtype)
        forwarded(engine, case.good)
        assert pipeline.calls > 0


@pytest.mark.parametrize("family", [*IN_A_ROW, *PADDED])
def test_an_architecture_waits_for_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_model(tmp_path, family, "EncoderModel" if family == "T5" else "Model")
    engine = create("embed", folder, device="cpu", max_model_len=200)
    on_gpu(engine, torch.bfloat16)
    own, variable = vars(packing)["varlen_attn"], []

    def as_flash_attention(query: torch.Tensor, *others: Any, **more: Any) -> Any:
        assert query.dtype in packing.HALVES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
        assert others[2].dtype == torch.int32
        variable.append(query.shape)
        return own(query, *others, **more)

    monkeypatch.setattr(packing, "varlen_attn", as_flash_attention)
    for padding in ("packed", "right") if family in IN_A_ROW else ("right",):
        engine._rows.padding = padding
        variable.clear()
        forwarded(engine, ["the mill", "a canal " * 30, "dry"])
        assert bool(variable) is (padding == "packed")


@pytest.mark.parametrize("family", ["Bert", "Roberta", "MPNet"])
def test_fused_layers_wait_for_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    engine = create("embed", family_model(tmp_path, family), device="cpu", max_model_len=200)
    pipeline = on_gpu(engine, torch.bfloat16)
    for part in engine.network.module.modules():
        if isinstance(part, PreTrainedModel):
            fusing.exchange(part.base_model)
    assert any(isinstance(part, fusing.FusedNorm) for part in engine.network.module.modules())
    forwarded(engine, ["the mill", "a canal " * 30, "dry"])
    assert pipeline.calls > 0


DECODERS = ["Llama", "Qwen3", "Mistral", "Gemma2"]


@pytest.mark.filterwarnings("default")  # of transformers, at making some of the models
@pytest.mark.parametrize("fault", [None, "item", "mask", "from the host"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_step_that_is_captured_waits_for_nothing(
    family: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "headrace.device.kernels", by_pytorch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    engine = create("generate", family_model(tmp_path, family, "ForCausalLM"), device="cpu", dtype="float32")
    model, device, own = engine._lm.model, FakeCuda(), decode_graphs.decode
    device.move(model, torch.bfloat16)

    def decode(call: Any, *others: Any) -> torch.Tensor:
        if fault:
            FAULTS[fault](call.query)
        return own(call, *others)

    monkeypatch.setattr(decode_graphs, "decode", decode)
    shapes = [dataclasses.replace(shape, dtype=torch.bfloat16) for shape in engine._shapes.shapes]
    with device._mode:
        paged = PagedModel(model, shapes, 40, gathers=True, kernels=True)
    host = {"tables": torch.zeros(4, 32).int(), "lengths": torch.ones(4).int(), "last": torch.arange(4)}
    tensors = {name: device.like(one, one.dtype) for name, one in {**host, "numbers": torch.zeros(3, 4).long()}.items()}
    plain = family != "Gemma2"  # which caps its scores
    with pytest.raises(WAITS if plain else RuntimeError) if fault or not plain else nullcontext(), device.at_work():
        assert decode_graphs._forward(paged, tensors).shape[0] == 4


WAITS = (DeviceWaitError, DataDependentOutputException, DynamicOutputShapeException)
FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda states: states.sum().item(),
    "list": lambda states: states.tolist(),
    "nonzero": lambda states: states.nonzero(),
    "mask": lambda states: states[states > 0],
    "if": lambda states: bool(states.sum() > 0),
    "all": lambda states: 1 if (states > 0).all() else 0,
    "equal": lambda states: torch.equal(states, states),
    "lengths": lambda states: torch.repeat_interleave(states.new_ones(3, dtype=torch.int64)),
    "from the host": lambda states: torch.zeros(3).to(states.device),
    "to the host": lambda states: states.cpu(),
    "array": lambda states: states.numpy(),
}
"""One of each kind."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_each_kind_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create("embed", family_model(tmp_path, "Bert"), device="cpu", max_model_len=200)
    on_gpu(engine, torch.bfloat16)
    own = packing.pooled

    def faulty(states: torch.Tensor, *others: Any) -> torch.Tensor:
        FAULTS[fault](states)
        return own(states, *others)

    monkeypatch.setattr(packing, "pooled", faulty)
    with pytest.raises(WAITS):
        forwarded(engine, ["the mill"])


SOURCES = Path(headrace.__file__).parent
HOT = [
    "device/cuda_graphs.py",
    "device/kernels.py",
    "device/graph_runner.py",
    "device/pipeline.py",
    "device/streams.py",
    "engines/generation/continuous.py",
    "engines/generation/decode_graphs.py",
    "engines/generation/paged_attention.py",
    "engines/generation/sampling.py",
    "engines/networks/fusing.py",
    "engines/networks/packing.py",
    "engines/networks/pytorch.py",
    "engines/text/classification.py",
    "engines/text/embedding.py",
    "engines/text/multi_vector.py",
    "engines/text/sparse.py",
    "engines/text/static.py",
]
ALLOWED = {
    ("device/streams.py", "wait"): "the copy to the host has ended",
    ("engines/generation/sampling.py", "choose"): "the tokens, once a step",
    ("engines/generation/sampling.py", "note"): "the log probabilities that are asked for",
    ("engines/networks/packing.py", "plan_of"): "NumPy's, on the host",
    ("engines/text/multi_vector.py", "__init__"): "at loading",
    ("engines/text/multi_vector.py", "_outputs"): "NumPy's, on the host",
    ("engines/text/sparse.py", "__call__"): "NumPy's, on the host",
}
READS = {"item", "tolist", "cpu", "numpy"}
ASKED = {"all", "any"}
"""In a condition."""


def reads_in(source: str) -> list[tuple[str, str]]:
    """Function and name of each call by which a host would read from a device."""
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST, function: str, asked: bool) -> None:
        nonlocal found
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            found += [(function, name) for name in (READS | ASKED if asked else READS) if node.func.attr == name]
        for name, value in ast.iter_fields(node):
            inner = asked or (isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) and name == "test")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    walk(child, function, inner and not isinstance(node, ast.FunctionDef))

    walk(ast.parse(source), "", False)
    return found


def test_no_hot_module_reads_from_the_device() -> None:
    found = {(name, function) for name in HOT for function, _ in reads_in((SOURCES / name).read_text())}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "line", ["x.item()", "x.tolist()", "x.cpu()", "x.numpy()", "if (x > 0).all(): pass", "1 if x.any() else 2"]
)
def test_a_read_of_each_kind_is_seen(line: str) -> None:
    assert len(reads_in(f"def forward(x):\n    {line}")) == 1
    assert reads_in("def forward(x):\n    return np.where(x.all(axis=0), x.mean(), 0)") == []
