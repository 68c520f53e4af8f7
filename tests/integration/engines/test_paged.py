"""The GPU's ways of attention over pages give what each answer gives alone, and never wait for the device."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.families import family_model
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.device.step_sizes import StepSize
from headrace.engines.choosing.registry import create
from headrace.engines.generation import paged_attention, paging
from headrace.engines.generation.options import Generation
from headrace.engines.generation.paged_attention import PAGE, PagedModel, ShapeProbe, StepPart, forward
from headrace.engines.generation.sampling import TokenSampler, choose
from headrace.engines.networks import packing
from headrace.engines.requests.generation import Sampling
from headrace.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(vocabulary: int) -> list[list[StepPart]]:
    """Prompts of 1 to 90 tokens, one of them in two parts, and then some tokens of each answer."""
    numbers = random.Random(0)
    pages = iter(numbers.sample(range(40), 40))
    texts = [numbers.choices(range(5, vocabulary), k=length) for length in (90, 1, 33, 2, 70)]
    tables: list[list[int]] = [[next(pages) for _ in range(4)] for _ in texts]

    def part(place: int, start: int, end: int) -> StepPart:
        return StepPart(texts[place][start:end], start, tables[place][: -(-end // PAGE)], end == len(texts[place]))

    found = [[part(place, 0, len(text)) for place, text in enumerate(texts[:4])] + [part(4, 0, 50)]]
    found.append([part(4, 50, 70)])
    for _ in range(3):
        for text in texts:
            text.append(numbers.randrange(5, vocabulary))
        found.append([part(place, len(text) - 1, len(text)) for place, text in enumerate(texts)])
    return found


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's, with the constraints of FlashAttention."""
    assert query.dtype == key.dtype == value.dtype in (torch.float16, torch.bfloat16)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
    outputs = []
    lengths, counts = cu_seq_q.diff(), cu_seq_k.diff()
    assert (lengths.max(), counts.max()) == (max_q, max_k)
    for (begin, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        own = torch.arange(last - first - (end - begin), last - first)[:, None]
        other = torch.arange(last - first)
        seen = other <= own
        if window_size[0] >= 0:
            seen &= other >= own - window_size[0]
        one, keys, values = (part.transpose(0, 1) for part in (query[begin:end], key[first:last], value[first:last]))
        found = torch.nn.functional.scaled_dot_product_attention(
            one, keys, values, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(found.transpose(0, 1))
    return torch.cat(outputs)


FAMILIES = ("Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3")


@pytest.mark.filterwarnings("default")  # of transformers, at making some of the models
@pytest.mark.parametrize("way", ["padded", "varlen", "varlen of PyTorch 2.11"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_keys_give_the_scores_of_each_answer_alone(
    tmp_path: Path, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "float32" if way == "padded" else "bfloat16"
    calls: list[int] = []

    def noted(*given: Any, window_size: tuple[int, int] = (-1, -1), **more: Any) -> torch.Tensor:
        calls.append(1)
        assert "enable_gqa" not in more or way == "varlen"
        return varlen_attn(*given, window_size=window_size, **more)

    monkeypatch.setattr(packing, "varlen_attn", noted)
    monkeypatch.setattr(packing, "_VARLEN", {"window_size", "enable_gqa"} if way == "varlen" else {"window_size"})
    engine = create("generate", family_model(tmp_path, family, "ForCausalLM"), device="cpu", dtype=dtype)
    model, shapes = engine._lm.model, engine._shapes.shapes
    alone, gathered = (PagedModel(model, shapes, 40, gathers=gathers) for gathers in (False, True))
    with torch.inference_mode():
        for stored in (*alone.layers, *gathered.layers):
            for one in stored:
                one.fill_(torch.nan)  # what nobody has written
    for step in steps(300):
        expected, found = alone.run(step), gathered.run(step)
        assert expected.shape[0] == sum(part.chooses for part in step)
        apart = (found - expected).float().norm() / expected.float().norm()
        assert apart < (1e-5 if way == "padded" else 0.05)
    plain = family not in ("Gemma2", "GptOss", "DeepseekV3")  # a cap, sinks, widths that differ
    assert bool(calls) == (way != "padded" and plain)


@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", "varlen"), ("bfloat16", "padded"), ("float32", "padded")])
def test_a_step_on_a_device_never_waits_for_it(dtype: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on `meta` refuses whatever reads its values, such as `item`, `nonzero` and a boolean index."""
    read: list[int] = []

    def to_list(tensor: torch.Tensor) -> list[int]:
        read.append(tensor.numel())
        return [0] * tensor.numel()

    if way == "padded":
        monkeypatch.setattr(packing, "_VARLEN", frozenset())
    monkeypatch.setattr(torch.Tensor, "tolist", to_list)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=400, intermediate_size=96, **sizes)
    model = LlamaForCausalLM(config).to("meta", getattr(torch, dtype)).eval()
    paged_attention.use_paged_attention(model)
    probe, places = ShapeProbe(), torch.arange(8, device="meta")
    forward(model, places, places, places[-1:], probe.attend)
    paged = PagedModel(model, probe.shapes, 40)
    assert paged.gathers
    for step in steps(400):
        logits = paged.run(step)
        assert logits.shape == (sum(part.chooses for part in step), 400)
        sampling = Sampling(temperature=1.0, top_p=0.9, min_p=0.1, presence_penalty=1.0, min_tokens=9)
        samplers = [TokenSampler(sampling, [7], 0, frozenset({3})) for _ in logits]
        choose(logits, samplers, [[5, 6]] * len(samplers))
        assert read.pop() == len(samplers) and not read


def test_the_cache_takes_four_fifths_of_a_gpu_with_weights_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(paging, "cuda_memory", lambda _: (SimpleNamespace(bytes=80 * gib), None))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 15 * gib)
    shapes = paging.CacheShapes.__new__(paging.CacheShapes)
    shapes.shapes = [paged_attention.AttentionShape(4, 128, 128, torch.bfloat16, None)] * 28
    shapes.step_bytes = gib
    cuda = torch.device("cuda")
    tokens = shapes.room(cuda)
    assert tokens * (28 + 1) * 4 * 256 * 2 == pytest.approx((64 - 15 - 1) * gib, rel=1e-3)
    lm: Any = SimpleNamespace(device=cuda, max_model_len=131_072)
    some, few = StepSize(256, 8_192), StepSize(2, 8_192)
    assert paging.choose_size(lm, shapes, some, some, Generation()).tokens == tokens
    assert lm.max_model_len == 131_072
    assert paging.choose_size(lm, shapes, few, few, Generation()).tokens == 2 * 131_072  # more is of no use


def test_a_model_of_a_long_context_loads_and_says_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = family_model(tmp_path, "Llama", "ForCausalLM", max_position_embeddings=131_072)
    engine = create("generate", folder, device="cpu")
    assert engine.profile.max_model_len == engine.profile.max_cost == 131_072
    bytes_ = engine._shapes.token_bytes * 40_000
    monkeypatch.setattr(paging, "memory_limit", lambda: SimpleNamespace(bytes=4 * bytes_))
    engine = create("generate", folder, device="cpu")
    assert engine.profile.max_model_len == engine.profile.max_cost == engine._lm.max_model_len == 40_000
    assert "a text may have 40000 tokens, prompt and answer together: cpu has no room" in caplog.text
    with pytest.raises(EngineError, match="no room for a cache of 50,000 tokens; lower"):
        create("generate", folder, device="cpu", max_model_len=50_000)


def test_no_room_for_the_cache_is_said_by_whatever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(paging, "PagedModel", full)
    with pytest.raises(EngineError, match="no room for a cache of") as caught:
        create("generate", family_model(tmp_path, "Llama", "ForCausalLM"), device="cpu")
    assert type(caught.value) is EngineError
