"""Encoders run without padding and on prepacked weights, with the same outputs."""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from tests.examples import examples
from tests.families import family_model
from tests.small_models import text_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import GELUActivation

from headrace.device.placement import naming_device_errors
from headrace.engines.choosing.registry import create
from headrace.engines.networks import cpu_attention, packing
from headrace.engines.networks.prepacking import PrepackedLinear
from headrace.engines.networks.pytorch import TOLERANCE
from headrace.engines.text.encoders import restore, tune
from headrace.errors import EngineOutOfMemoryError

LENGTHS = (3, 40, 1, 17, 40, 3, 9)
SIZES = {"vocab_size": 97, "max_position_embeddings": 200, "pad_token_id": 1, "initializer_range": 0.1}
NAMES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ONES_OWN = {"dim": 256, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
SHARED = NAMES | {"num_key_value_heads": 2, "head_dim": 64}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FIT: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("Bert", NAMES),
    "Roberta": ("Roberta", NAMES),
    "XLMRoberta": ("XLMRoberta", NAMES),
    "Electra": ("Electra", NAMES),
    "Albert": ("Albert", NAMES),
    "DistilBert": ("DistilBert", ONES_OWN),
    "ModernBert": ("ModernBert", NAMES | {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "Qwen3": ("Qwen3", SHARED),  # causal, heads that share keys
    "Gemma3": ("Gemma3Text", SHARED | WINDOWS),
    "EmbeddingGemma": ("Gemma3Text", SHARED | WINDOWS | {"use_bidirectional_attention": True}),
    "causal": ("Bert", NAMES | {"is_decoder": True}),
}
"""Families by the name of their classes, and how they are made small."""


def made(family: str, sizes: dict[str, Any], kind: str = "Model", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes, **more)
    return getattr(transformers, f"{family}{kind}")(config).eval()


def batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape) * 31 % 95 + 2
    return {"input_ids": ids.where(mask, 1), "attention_mask": mask.long()}


def states(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    return found


def in_a_row(call: Any, inputs: dict[str, torch.Tensor], *, tiled: bool = False) -> torch.Tensor:
    """What `call` gives for the batch as a row, which ends with some filling."""
    mask = inputs["attention_mask"].bool()
    lengths = mask.sum(1).numpy()
    plan = packing.plan_of(lengths, tiled=tiled, filled=True)
    row = {
        "input_ids": inputs["input_ids"][mask],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
    }
    row = {name: torch.cat([one, one[:1].repeat(plan.length - len(one))]).int() for name, one in row.items()}
    with torch.inference_mode():
        found: torch.Tensor = packing.called_with(call, plan)({**row, packing.STARTS: torch.from_numpy(plan.starts)})
    return found


def row_states(model: Any, inputs: dict[str, torch.Tensor], *, tiled: bool = False) -> torch.Tensor:
    def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row = packing.current()
        assert row is not None
        return packing.states(model, tensors, row)

    assert packing.use(model) == ""
    return in_a_row(call, inputs, tiled=tiled)


def seen_by(layer: torch.nn.Module) -> list[int]:
    """How many tokens each call of a layer gets, from now on."""
    tokens: list[int] = []
    layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:-1].numel()))
    return tokens


def first_layer(base: Any) -> torch.nn.Module:
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    found: torch.nn.Module = lists[0][0]
    return found


@pytest.mark.parametrize("name", FIT)
def test_layers_see_no_padding_and_nothing_changes(name: str) -> None:
    model = made(*FIT[name])
    before = states(model, batch())
    assert tune(model)
    tokens = seen_by(first_layer(model))
    torch.testing.assert_close(row_states(model, batch()), before, rtol=1e-4, atol=1e-5)
    assert set(tokens) == {packing.row_length(sum(LENGTHS))}
    torch.testing.assert_close(states(model, batch()), before, rtol=1e-4, atol=1e-5)  # a padded batch, as before


@pytest.mark.parametrize("name", ["Bert", "ModernBert", "Qwen3", "EmbeddingGemma"])
def test_in_sixteen_bits_too(name: str) -> None:
    model = made(*FIT[name]).bfloat16()
    before = states(model, batch()).float()
    found = row_states(model, batch(), tiled=True).float()
    assert float((found - before).abs().max()) <= TOLERANCE[torch.bfloat16] * float(before.abs().max())


@given(st.integers(0, 1 << 20))
def test_a_row_is_filled_by_a_sixteenth_at_most(tokens: int) -> None:
    length = packing.row_length(tokens)
    assert tokens <= length <= tokens * 17 / 16
    assert packing.row_length(length) == length


def test_rows_have_few_lengths_whatever_the_batches() -> None:
    assert len({packing.row_length(tokens) for tokens in range(4_097, 8_193)}) == 16
    assert packing.plan_of(np.array([10] * 61), tiled=False, filled=True).length == 640
    assert packing.plan_of(np.array([10] * 61), tiled=False, filled=False).length == 610


@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=40),
    st.integers(0, 1 << 30),
    st.booleans(),
    st.sampled_from([(False, None), (True, None), (False, 5), (True, 9)]),
)
@settings(deadline=None, max_examples=examples(80))
def test_a_text_attends_to_itself_alone(
    lengths: list[int], seed: int, tiled: bool, kind: tuple[bool, int | None]
) -> None:
    causal, window = kind
    plan = packing.plan_of(np.array(sorted(lengths, reverse=True)), tiled=tiled, filled=True)
    torch.manual_seed(seed)
    row = torch.randn(3, 1, 2, plan.length, 8)
    with packing.on_row(packing.PackedRow(plan, torch.from_numpy(plan.starts))):
        found, _ = packing.attend(
            torch.nn.Identity(), row[0], row[1], row[2], None, is_causal=causal, sliding_window=window
        )
    for start, end in itertools.pairwise(plan.starts.tolist()):
        queries, keys, values = row[:, 0, :, start:end]
        places = torch.arange(end - start)
        distance = places[None] - places[:, None]
        hidden = (distance.abs() >= (window or 1_000)) | ((distance > 0) & causal)
        weights = (queries @ keys.transpose(1, 2) / 8**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(found[0, start:end], (weights @ values).transpose(0, 1), rtol=1e-4, atol=1e-5)
    assert found.shape[1] == row.shape[3]
    assert found[0, plan.tokens :].count_nonzero() == 0


@given(st.integers(1, 500), st.integers(1, 600))
def test_tiles_hold_every_text_and_are_aligned(count: int, length: int) -> None:
    (run,) = packing.plan_of(np.full(count, length), tiled=True, filled=True).runs
    assert run.width % 32 == 0 and run.step <= run.width < run.step + 32
    assert (run.tiles - 1) * run.shared < count <= run.tiles * run.shared
    assert run.shared == 1 or run.step <= 128
    assert run.reach >= count * length


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_gets_tiles_in_sixteen_bits_alone(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    engine = create("embed", device="cpu", dtype=dtype)
    ready = engine.prepare(["a", "the canal feeds the mill wheel", "a mill " * 20, "the mill"])
    seen: set[int] = set()

    def noting(queries: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.add(queries.shape[2])
        return attend(queries, *others)

    attend = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", noting)
    engine.forward([one.payload for one in ready])
    assert {width % 32 for width in seen} == {0} if dtype == "bfloat16" else seen == {one.cost for one in ready}


def test_short_texts_share_tiles() -> None:
    (run,) = packing.plan_of(np.full(100, 8), tiled=True, filled=True).runs
    assert run.shared > 1


@pytest.mark.parametrize("native", [True, False], ids=["native", "emulated"])
def test_bfloat16_weights_are_prepacked_where_the_cpu_computes_bfloat16(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if native and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU does not compute bfloat16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    model = made("Bert", NAMES).bfloat16()
    before = states(model, batch()).float()
    assert tune(model) is native
    found = states(model, batch()).float()
    assert float((found - before).abs().max()) <= TOLERANCE[torch.bfloat16] * float(before.abs().max())
    restore(model)
    assert torch.equal(states(model, batch()).float(), before)


class Waits(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not read here
    """Notes operations whose result or size a host must know, which on a GPU it can only wait for."""

    OPS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            one is not None and one.dtype == torch.bool for one in (args[1] if isinstance(args[1], list) else ())
        )
        if name in self.OPS or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_batch_of_texts_is_queued_without_asking_the_device_for_anything() -> None:
    engine = create("embed", device="cpu", dtype="float32")
    inputs = [one.payload for one in engine.prepare(["a", "the canal feeds the mill wheel", "the mill", "a mill"])]
    with Waits() as waits:
        engine.forward(inputs)
        assert waits.found == []
        torch.ones(3)[torch.tensor([True, False, True])].sum().item()
        assert len(waits.found) == 2, "it does not see them"


def test_a_batch_that_ran_out_of_memory_frees_it_while_its_error_is_handled() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def model(size: int) -> None:
        activations = torch.zeros(size)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(EngineOutOfMemoryError) as caught, naming_device_errors(torch.device("cpu"), lambda: "a batch"):
        model(10)
    assert held[0]() is None, caught.value


def test_texts_of_one_length_are_one_run() -> None:
    model = made("Bert", NAMES)
    inputs = batch((12,) * 5)
    before = states(model, inputs)
    torch.testing.assert_close(row_states(model, inputs), before, rtol=1e-4, atol=1e-5)
    assert len(packing.plan_of(np.full(5, 12), tiled=False, filled=False).runs) == 1


@pytest.mark.parametrize("mode", packing.POOLED)
def test_texts_are_pooled_as_padded_ones(mode: str) -> None:
    inputs = batch()
    found = torch.randn(*inputs["input_ids"].shape, 16)
    mask = inputs["attention_mask"]
    pooling = Pooling(16, pooling_mode=mode)
    expected = pooling({"token_embeddings": found.clone(), "attention_mask": mask})["sentence_embedding"]
    plan = packing.plan_of(np.array(LENGTHS), tiled=False, filled=False)
    row = packing.PackedRow(plan, torch.from_numpy(plan.starts))
    torch.testing.assert_close(packing.pooled(found[mask.bool()], row, mode), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("MPNet", NAMES, "attention"),  # its own, with a bias by place
        ("DebertaV2", NAMES, "attention"),
        ("T5", {"d_model": 256, "num_layers": 1}, "positions"),
        ("Bert", NAMES | {"output_hidden_states": True}, "layers"),
    ],
)
def test_a_model_that_cannot_take_a_row_says_why(family: str, sizes: dict[str, Any], reason: str) -> None:
    model = made(family, sizes)
    before = model.config._attn_implementation
    assert reason in packing.use(model)
    packing.undo(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "reason"), [("MPNet", "its attention is eager"), ("MobileBert", "its outputs would be others")]
)
def test_a_fall_to_padding_is_said_with_its_reason(
    family: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create("embed", family_model(tmp_path, family), device="cpu", max_model_len=200)
    assert engine._rows.padding == "right" and reason in engine._rows.reason
    with caplog.at_level(logging.DEBUG, "headrace"):
        create("embed", family_model(tmp_path, family), device="cpu", max_model_len=200)
    assert [reason in one for one in caplog.messages if "padded" in one] == [True]


def test_a_change_that_gives_other_numbers_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Bert", NAMES)
    untouched = copy.deepcopy(model)
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, states: torch.zeros(*states.shape[:-1], 256))
    assert not tune(model)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]
    torch.testing.assert_close(states(model, batch()), states(untouched, batch()))


def test_a_change_that_fails_half_way_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Bert", NAMES)
    before = states(model, batch())
    own, calls = PrepackedLinear.__init__, itertools.count()

    def fails_later(self: PrepackedLinear, linear: torch.nn.Linear) -> None:
        if next(calls) == 3:
            raise RuntimeError("this CPU cannot reorder weights")
        own(self, linear)

    monkeypatch.setattr(PrepackedLinear, "__init__", fails_later)
    assert not tune(model)
    assert not any(isinstance(part, PrepackedLinear) for part in model.modules())
    torch.testing.assert_close(states(model, batch()), before, rtol=1e-4, atol=1e-5)


def test_what_was_done_can_be_taken_back() -> None:
    model = made("Bert", NAMES)
    untouched = copy.deepcopy(model)
    tune(model)
    packing.use(model)
    assert not any(isinstance(part, torch.nn.Linear | GELUActivation) for part in model.encoder.modules())
    restore(model)
    kinds = [[type(part) for part in one.modules()] for one in (model, untouched)]
    assert kinds[0] == kinds[1]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in untouched.named_parameters()]
    for name, parameter in untouched.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    torch.testing.assert_close(states(model, batch()), states(untouched, batch()))


def test_a_small_model_and_one_without_texts_are_left_alone() -> None:
    assert not tune(made("Bert", NAMES | {"hidden_size": 128}))
    vit = transformers.ViTConfig(hidden_size=256, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    assert not tune(transformers.ViTModel(vit))


def test_the_engines_of_texts_run_without_padding(tmp_path: Path) -> None:
    classify = create("classify", text_model(tmp_path, hidden_size=256, initializer_range=0.1), device="cpu")
    for engine, base in (
        (embed := create("embed", device="cpu"), embed.network.module[0].model),
        (classify, classify.network.module.base_model),
    ):
        ready = engine.prepare(["a", "the canal feeds the mill wheel", "so that it never runs dry " * 9])
        tokens = seen_by(first_layer(base))
        engine.forward([one.payload for one in ready])
        assert tokens == [packing.row_length(int(sum(one.cost for one in ready)))]
        assert any(isinstance(module, PrepackedLinear) for module in base.modules())
