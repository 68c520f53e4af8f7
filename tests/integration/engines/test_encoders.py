"""Encoders run without padding and on prepacked weights, with the same outputs."""

from __future__ import annotations

import copy
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.small_models import text_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import GELUActivation

from headrace.device.placement import running
from headrace.engines.choosing.registry import create
from headrace.engines.networks import cpu_attention
from headrace.engines.networks.prepacking import PrepackedLinear
from headrace.engines.networks.pytorch import TOLERANCE, known_mask
from headrace.engines.text import packing
from headrace.engines.text.encoders import restore, tune
from headrace.errors import EngineOutOfMemoryError

LENGTHS = (3, 40, 1, 17, 40, 3, 9)
SIZES = {"vocab_size": 97, "max_position_embeddings": 200, "pad_token_id": 1, "initializer_range": 0.1}
NAMES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ONES_OWN = {"dim": 256, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
FIT = {"Bert": NAMES, "Roberta": NAMES, "XLMRoberta": NAMES, "Electra": NAMES, "Albert": NAMES, "DistilBert": ONES_OWN}
"""Families by the name of their classes, and how they are made small."""


def made(family: str, sizes: dict[str, Any], kind: str = "Model", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes, **more)
    return getattr(transformers, f"{family}{kind}")(config).eval()


def batch(*, left: bool = False) -> dict[str, torch.Tensor]:
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    mask = mask.flip(1) if left else mask
    ids = torch.arange(mask.numel()).view(mask.shape) * 31 % 95 + 2
    return {"input_ids": ids.where(mask, 1), "attention_mask": mask.long()}


def states(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode(), known_mask(inputs["attention_mask"].numpy()):
        found: torch.Tensor = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    return found


def seen_by(layer: torch.nn.Module) -> list[int]:
    """How many tokens each call of a layer gets, from now on."""
    tokens: list[int] = []
    layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:-1].numel()))
    return tokens


def first_layer(base: Any) -> torch.nn.Module:
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    found: torch.nn.Module = lists[0][0]
    return found


@pytest.mark.parametrize("family", FIT)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_layers_see_no_padding_and_nothing_changes(family: str, left: bool) -> None:
    model = made(family, FIT[family])
    before = states(model, batch(left=left))
    assert tune(model) == ["prepacked", "packed"]
    tokens = seen_by(first_layer(model))
    torch.testing.assert_close(states(model, batch(left=left)), before, rtol=1e-4, atol=1e-5)
    assert set(tokens) == {packing.row_length(sum(LENGTHS))}


@given(st.integers(0, 1 << 20))
def test_a_row_is_filled_by_a_sixteenth_at_most(tokens: int) -> None:
    length = packing.row_length(tokens)
    assert tokens <= length <= tokens * 17 / 16
    assert packing.row_length(length) == length


def test_rows_have_few_lengths_whatever_the_batches() -> None:
    assert len({packing.row_length(tokens) for tokens in range(4_097, 8_193)}) == 16
    model = made("Bert", NAMES)
    tune(model)
    tokens = seen_by(first_layer(model))
    for count in range(60, 65):  # with and without padding
        for lengths in ([10] * count, [10] * (count - 1) + [3]):
            mask = (torch.arange(10)[None] < torch.tensor(lengths)[:, None]).long()
            states(model, {"input_ids": torch.full(mask.shape, 7), "attention_mask": mask})
    assert set(tokens) <= {608, 640}


@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=60)
def test_a_text_attends_to_itself_alone(lengths: list[int], seed: int) -> None:
    lengths.sort(reverse=True)
    texts = packing.ragged(np.array(lengths), torch.device("cpu"), tiled=True)
    torch.manual_seed(seed)
    row = torch.randn(3, 1, 2, packing.row_length(max(texts.reach, sum(lengths))), 8)
    found, _ = packing.attend(torch.nn.Identity(), *row, None, headrace_texts=texts)
    start = 0
    for length in lengths:
        queries, keys, values = row[:, 0, :, start : start + length]
        weights = (queries @ keys.transpose(1, 2) / 8**0.5).softmax(-1)
        expected = (weights @ values).transpose(0, 1)
        torch.testing.assert_close(found[0, start : start + length], expected, rtol=1e-4, atol=1e-5)
        start += length
    assert found.shape[1] == row.shape[3]
    assert found[0, start:].count_nonzero() == 0


@given(st.integers(1, 500), st.integers(1, 600))
def test_tiles_hold_every_text_and_are_aligned(count: int, length: int) -> None:
    (run,) = packing.ragged(np.full(count, length), torch.device("cpu"), tiled=True).runs
    assert run.width % 32 == 0 and run.step <= run.width < run.step + 32
    assert (run.tiles - 1) * run.shared < count <= run.tiles * run.shared
    assert run.shared == 1 or run.step <= 128
    assert run.reach >= count * length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_gets_tiles_in_sixteen_bits_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    model = made("Bert", NAMES).to(dtype)
    tune(model)
    seen: set[int] = set()

    def noting(queries: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.add(queries.shape[2])
        return attend(queries, *others)

    attend = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", noting)
    states(model, batch())
    assert {width % 32 for width in seen} == {0} if dtype == torch.bfloat16 else seen == set(LENGTHS)


def test_short_texts_share_tiles() -> None:
    (run,) = packing.ragged(np.full(100, 8), torch.device("cpu"), tiled=True).runs
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
    assert tune(model) == (["prepacked", "packed"] if native else ["packed"])
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

    with pytest.raises(EngineOutOfMemoryError) as caught, running(torch.device("cpu"), lambda: "a batch"):
        model(10)
    assert held[0]() is None, caught.value


def test_what_follows_the_encoder_gets_its_own_shape() -> None:
    for family in ("Bert", "Roberta"):  # the one pools within its base, the other within its head
        model = made(family, NAMES, "ForSequenceClassification", num_labels=3)
        with torch.inference_mode():
            before = model(**batch()).logits
            assert "packed" in tune(model)
            with known_mask(batch()["attention_mask"].numpy()):
                torch.testing.assert_close(model(**batch()).logits, before, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(**batch()).logits, before, rtol=1e-4, atol=1e-5)  # on the padded batch


def test_texts_of_one_length_are_run_as_they_come() -> None:
    model = made("Bert", NAMES)
    inputs = {"input_ids": torch.arange(60).view(5, 12) + 2, "attention_mask": torch.ones(5, 12, dtype=torch.long)}
    before = states(model, inputs)
    tune(model)
    torch.testing.assert_close(states(model, inputs), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("MPNet", NAMES),  # its encoder adds a bias by place, for the shape it sees
        ("Bert", NAMES | {"is_decoder": True}),  # no token sees those behind it
        ("ModernBert", NAMES | {"local_attention": 8, "global_attn_every_n_layers": 2}),  # no encoder of its own
        ("DebertaV2", NAMES),  # its own attention
        ("Bert", NAMES | {"output_hidden_states": True}),  # what each layer gives is asked for
    ],
    ids=["bias", "causal", "windows", "own", "layers"],
)
def test_a_model_that_cannot_be_packed_is_padded_as_before(family: str, sizes: dict[str, Any]) -> None:
    model = made(family, sizes)
    before = states(model, batch())
    attention = model.config._attn_implementation
    assert "packed" not in tune(model)
    assert model.config._attn_implementation == attention
    assert not any(isinstance(module, packing.PackedEncoder) for module in model.modules())
    torch.testing.assert_close(states(model, batch()), before, rtol=1e-4, atol=1e-5)


def test_a_change_that_gives_other_numbers_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Bert", NAMES)
    untouched = copy.deepcopy(model)
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, states: torch.zeros(*states.shape[:-1], 256))
    monkeypatch.setattr(packing, "attend", lambda module, query, *_, **__: (query.transpose(1, 2) * 1.01, None))
    assert tune(model) == []
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
    assert tune(model) == ["packed"]
    assert not any(isinstance(part, PrepackedLinear) for part in model.modules())
    torch.testing.assert_close(states(model, batch()), before, rtol=1e-4, atol=1e-5)


def test_what_was_done_can_be_taken_back() -> None:
    model = made("Bert", NAMES)
    untouched = copy.deepcopy(model)
    tune(model)
    assert not any(isinstance(part, torch.nn.Linear | GELUActivation) for part in model.encoder.modules())
    restore(model)
    kinds = [[type(part) for part in one.modules()] for one in (model, untouched)]
    assert kinds[0] == kinds[1]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in untouched.named_parameters()]
    for name, parameter in untouched.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    torch.testing.assert_close(states(model, batch()), states(untouched, batch()))


def test_a_small_model_and_one_without_texts_are_left_alone() -> None:
    assert tune(made("Bert", NAMES | {"hidden_size": 128})) == []
    vit = transformers.ViTConfig(hidden_size=256, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    assert tune(transformers.ViTModel(vit)) == []


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
