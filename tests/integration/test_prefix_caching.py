"""Requests that share pages of the key-value cache: the answers they have alone, whatever else happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.integration.jobs.harness import Runner, write_rows

from headrace import ContinuousBatcher
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing import registry
from headrace.engines.generation import continuous, paged_attention, paging
from headrace.errors import ConfigError, EngineError
from headrace.events import Event, OrderChosen, StepDone
from headrace.jobs.pipeline.job import JobEnd

CONTEXT = 96
LETTERS = "abcdefghij"
PAGE = 8


@pytest.fixture(scope="module", autouse=True)
def _small_pages(one_thread: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (continuous, paging, paged_attention):
            patch.setattr(module, "PAGE", PAGE)
        patch.setitem(paging._START, "cpu", StepSize(64, 24))  # most prompts take several steps
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def llama(target: Path, **more: Any) -> Path:
    """A Llama of random weights with letters for tokens. Its logits are far apart: rounding decides nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from headrace.engines.generation.causal_lm import ARITHMETIC

    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(str(ARITHMETIC))
    config = AutoConfig.for_model(
        **{
            "model_type": "llama",
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.4,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **more,
        }
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    words.save_pretrained(target)
    return target


@cache
def requests() -> list[dict[str, Any]]:
    """The branches of a tree of prompts, some of them whole pages, some the same, some with a stop string."""
    rng = random.Random(3)
    prompts = [""]
    for _ in range(30):
        stem = rng.choice(prompts)
        grown = stem + "".join(rng.choices(LETTERS, k=rng.choice([1, 7, 8, 15, 16, 24])))
        prompts.append(grown if len(grown) < 70 else stem)
    return [
        {
            "prompt": prompt or "a",
            "max_tokens": rng.choice([1, 2, 9, 20]),
            "ignore_eos": True,
            "stop": rng.choice([[], [], ["a", "b", "c"]]),
        }
        for prompt in prompts
    ]


def payloads(engine: Any, inputs: list[Any]) -> list[Any]:
    prepared = engine.prepare(inputs)
    assert not [item for item in prepared if isinstance(item, Exception)]
    return [item.payload for item in prepared]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    engine = registry.create("generate", folder, engine="static")
    return [engine.forward([ask])[0] for ask in payloads(engine, requests())]


ENDINGS = st.sampled_from(["finishes", "finishes", "cancelled", "resumed"])


@settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    records=st.lists(st.tuples(st.integers(0, 30), ENDINGS, st.integers(0, 12)), min_size=4, max_size=16),
    cached=st.sampled_from([CONTEXT, 2 * CONTEXT, 8 * CONTEXT]),
    gathers=st.booleans(),
)
def test_the_same_answers_as_one_at_a_time(
    folder: Path, alone: list[Any], records: list[tuple[int, str, int]], cached: int, gathers: bool
) -> None:
    """All at once, with too few pages for all, without a batcher that would keep some out.

    Gathers: the keys of all answers, as on a GPU.
    """
    engine = registry.create("generate", folder, max_num_seqs=8, kv_cache_tokens=cached)
    engine._paged.gathers = gathers
    pages = engine._scheduler.pages.available
    asks = payloads(engine, requests())
    running = {key: which for key, (which, _, _) in enumerate(records)}
    for key, which in running.items():
        engine.add(key, asks[which])
    for number in range(2_000):
        for key, (_, ending, when) in enumerate(records):
            if key in running and when == number and ending != "finishes":
                resume = engine.remove(key)
                which = running.pop(key)
                if ending == "resumed":
                    assert resume is not None
                    engine.add(key + 100, resume)
                    running[key + 100] = which
        for key, answer in engine.step():
            assert answer == alone[running.pop(key)]
        assert {engine.shared(key) % PAGE for key in running} <= {0}
        if not running:
            break
    assert not running
    assert engine._scheduler.pages.available == pages


def test_pages_of_a_step_that_failed_are_not_shared(
    folder: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = registry.create("generate", folder, max_num_seqs=8)
    pages, asks = engine._scheduler.pages.available, payloads(engine, requests())[:8]
    for key, ask in enumerate(asks):
        engine.add(key, ask)
    finished = {key for key, _ in engine.step()}

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is out of order")

    with monkeypatch.context() as patch:
        patch.setattr(paged_attention, "forward", broken)
        with pytest.raises((RuntimeError, EngineError)):
            engine.step()
    for key in range(8):
        engine.remove(key)
    assert engine._scheduler.pages.available == pages
    for key, ask in enumerate(asks):
        engine.add(100 + key, ask)
    answers: dict[int, Any] = {}
    while len(answers) < 8:
        answers |= dict(engine.step())
    assert [answers[100 + key] for key in range(8)] == alone[:8]
    assert len(finished) < 8


def run(engine: Any, inputs: list[Any], listener: Any = None) -> list[Any]:
    async def main() -> list[Any]:
        slots, budget = engine.profile.max_in_flight, engine.profile.max_cost
        async with ContinuousBatcher(engine, max_slots=slots, max_cost=budget, listener=listener) as batcher:
            return [answer async for answer in batcher.map(payloads(engine, inputs))]

    return asyncio.run(main())


DOCUMENT = "abcdefgh" * 6  # 6 pages


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": DOCUMENT + "j" * number, "max_tokens": 4, "ignore_eos": True, **more} for number in range(count)]


def test_a_prefix_is_computed_once_also_by_requests_that_come_together(folder: Path) -> None:
    engine = registry.create("generate", folder, max_num_seqs=16)
    run(engine, questions(8))
    stats = engine.prefix_cache_stats()
    assert stats.queries == sum(48 + number for number in range(8))
    assert stats.computed == 48 + sum(range(8))
    assert stats.hits == stats.queries - stats.computed


def test_an_answer_of_one_token_leaves_its_pages_to_others(folder: Path) -> None:
    engine = registry.create("generate", folder, max_num_seqs=1)
    run(engine, questions(4, max_tokens=1))
    assert engine.prefix_cache_stats().hits >= 3 * 40


def test_more_requests_fit_where_pages_are_shared(folder: Path) -> None:
    def most(share: bool) -> int:
        events: list[Event] = []
        engine = registry.create(
            "generate", folder, max_num_seqs=16, kv_cache_tokens=2 * CONTEXT, enable_prefix_caching=share
        )
        run(engine, questions(16), events.append)
        assert not any(event.sent_back for event in events if isinstance(event, StepDone))
        return max(event.size for event in events if isinstance(event, StepDone))

    assert most(share=False) == 3
    assert most(share=True) >= 9


def test_answers_of_requests_that_the_batcher_sends_back(folder: Path) -> None:
    engine = registry.create("generate", folder, max_num_seqs=16, kv_cache_tokens=CONTEXT)
    short = questions(17, stop=list(LETTERS), max_tokens=30)  # teaches that answers are short
    long = questions(17, max_tokens=30)
    events: list[Event] = []
    answers = run(engine, short + long, events.append)
    assert sum(event.sent_back for event in events if isinstance(event, StepDone)) > 0
    static = registry.create("generate", folder, engine="static")
    assert answers == [static.forward([ask])[0] for ask in payloads(static, short + long)]


def test_groups_that_are_all_larger_than_the_cache_lose_nothing(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    documents = ["".join(rng.choices(LETTERS, k=72)) for _ in range(8)]  # 9 pages
    rows: list[Any] = [
        {"text": document + "".join(rng.choices(LETTERS, k=12))} for document in documents for _ in range(6)
    ]
    rng.shuffle(rows)
    source = write_rows(tmp_path / "in.jsonl", rows)
    computed: dict[str, int] = {}
    for order in ("input", "auto"):
        engine = registry.create("generate", folder, max_num_seqs=4, kv_cache_tokens=128, max_tokens=4, ignore_eos=True)
        job = Runner(source, tmp_path / f"{order}.jsonl", engine)
        assert job.run(order=order) == JobEnd("finished", 48, 0)
        computed[order] = engine.prefix_cache_stats().computed
    assert [event.order for event in job.emitted(OrderChosen)] == ["prefix"]
    assert job.sink.read_bytes() == (tmp_path / "input.jsonl").read_bytes()
    assert computed["auto"] == 8 * 72 + 48 * 12 < computed["input"]


SLIDING = {"model_type": "mistral", "sliding_window": 16}


def test_layers_that_see_a_window_share_too(tmp_path: Path) -> None:
    target = llama(tmp_path, **SLIDING)
    engine = registry.create("generate", target, max_num_seqs=4)
    static = registry.create("generate", target, engine="static")
    inputs = questions(6)
    assert run(engine, inputs) == [static.forward([ask])[0] for ask in payloads(static, inputs)]
    assert engine.prefix_cache_stats().hits >= 5 * 40


def test_another_value_than_true_or_false_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is 'yes'"):
        registry.create("generate", folder, enable_prefix_caching="yes")
