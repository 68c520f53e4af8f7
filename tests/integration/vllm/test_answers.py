"""What the vLLM engine answers: the same as its references, whatever runs beside it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.batching.passthrough import PassthroughBatcher
from headrace.engines.base import Chunks
from headrace.engines.requests.long_prompts import LongPrompts, PromptSplitter
from headrace.errors import RecordError
from headrace.serving.admission.waiting import run_chunks

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def questions(count: int) -> list[str]:
    """Prompts of very mixed length, each another."""
    draw = random.Random(3)
    return [f"{number}: {' '.join(draw.choices(WORDS, k=draw.randint(1, 12)))}" for number in range(count)]


def answers(engine: Any, inputs: list[Any]) -> list[Any]:
    """Outputs, or errors, in input order; all requests under way at once, as far as the engine lets them."""
    prepared = engine.prepare(inputs)

    async def main() -> list[Any]:
        async with PassthroughBatcher(engine.infer, max_in_flight=engine.profile.max_in_flight) as batcher:
            good = [item.payload for item in prepared if not isinstance(item, Exception)]
            results = [result async for result in batcher.map(good, return_exceptions=True)]
        left = iter(results)
        return [item if isinstance(item, Exception) else next(left) for item in prepared]

    return asyncio.run(main())


def answer(engine: Any, value: Any) -> Any:
    """One output."""
    (only,) = answers(engine, [value])
    if isinstance(only, Exception):
        raise only
    return only


def test_greedy_answers_are_the_same_alone_together_shuffled_and_from_the_references(
    engine: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import vllm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = questions(24)
    together = [item["text"] for item in answers(engine, prompts)]
    alone = [answer(engine, prompt)["text"] for prompt in prompts]
    order = random.Random(5).sample(range(len(prompts)), len(prompts))
    shuffled = dict(zip(order, answers(engine, [prompts[at] for at in order]), strict=True))
    assert together == alone == [shuffled[at]["text"] for at in range(len(prompts))]

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    reference = vllm.LLM(
        str(model), dtype="float32", enforce_eager=True, max_model_len=512, disable_log_stats=True, seed=0
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=12)
    assert together == [output.outputs[0].text for output in reference.generate(prompts, params, use_tqdm=False)]

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, text in zip(prompts, together, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = plain.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        assert tokenizer.decode(made, skip_special_tokens=True) == text


def test_counts_and_finish_reasons_are_those_of_the_tokens(engine: Any) -> None:
    answered = answer(engine, {"prompt": "hello", "max_tokens": 5, "ignore_eos": True})
    assert answered["finish_reason"] == "length"
    assert (answered["prompt_tokens"], answered["completion_tokens"], len(answered["text"])) == (5, 5, 5)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(engine: Any) -> None:
    free = answer(engine, {"prompt": "hello", "max_tokens": 40, "ignore_eos": True})["text"]
    stop = free[7:9]
    stopped = answer(engine, {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stop": [stop]})
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_a_chat_is_rendered_by_the_models_template(engine: Any) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]}
    rendered = "system: Be brief.\nuser: 2+2?\na: "
    assert answer(engine, chat) == answer(engine, rendered) == answer(engine, chat["messages"])


def test_a_sampled_answer_is_its_seeds_whatever_runs_beside_it(engine: Any) -> None:
    seeded = {"prompt": "hello", "temperature": 1.0, "seed": 7}
    first = answer(engine, seeded)
    beside = answers(engine, [*questions(10), seeded, *({**seeded, "seed": seed} for seed in range(20, 24))])
    assert beside[10] == first
    assert len({item["text"] for item in beside[11:]}) > 1


def test_without_a_seed_of_its_own_a_sampled_answer_is_the_engines_seeds(engine: Any) -> None:
    sampled = {"prompt": "hello", "temperature": 1.0}
    first = answer(engine, sampled)
    assert answers(engine, [*questions(10), sampled])[10] == first
    assert answer(engine, {**sampled, "seed": 1}) != first


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "holds"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: re.fullmatch("[0-9]{3}", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: json.loads(text)["a"] in (1, 2)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            lambda text: json.loads(text)["a"] in (1, 2),
        ),
    ],
)
def test_structured_output_has_the_structure(
    engine: Any, constraint: dict[str, Any], holds: Callable[..., Any]
) -> None:
    assert holds(answer(engine, {"prompt": "hello", "max_tokens": 200, **constraint})["text"])


def test_bad_requests_fail_alone(engine: Any) -> None:
    bad = [
        (None, "null"),
        ("", "empty"),
        ("x" * 512, "no room for an answer"),
        ("x" * 5_000, "maximum context length is 512"),
        ([{"role": "wizard", "content": "hi"}], "wizard"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0"),
        ({"prompt": "a", "structured_outputs": {"regex": "[0-9"}}, "regex"),
        ({"prompt": "a", "structured_outputs": {"regexp": "[0-9]"}}, "regexp"),
        ({"prompt": "a", "structured_outputs": "json"}, "structured_outputs is 'json'"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "1000000"),
        ({"prompt": "a", "logit_bias": {"one": 1}}, "one"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias is [1]: it must be an object"),
        ({"prompt": "a", "logit_bias": {"1": "a lot"}}, "logit_bias is {'1': 'a lot'}"),
        ({"prompt": "a", "stop_token_ids": "x"}, "stop_token_ids"),
        ({"prompt": "a", "bad_words": 3}, "bad_words"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"prompt": "half a pair: \ud800"}, "Unicode"),
    ]
    results = answers(engine, [value for value, _ in bad] + ["fine"])
    for (value, message), error in zip(bad, results, strict=False):
        assert isinstance(error, RecordError), (value, error)
        assert message in str(error), (value, error)
    assert results[-1]["completion_tokens"] > 0


def test_an_answer_that_never_ends_is_cut_where_the_context_ends(engine: Any) -> None:
    endless = answer(engine, {"prompt": "hello", "max_tokens": 100_000, "ignore_eos": True})
    assert endless["finish_reason"] == "length"
    assert endless["prompt_tokens"] + endless["completion_tokens"] == 512


def test_prompt_tokens_of_the_prefix_cache_are_counted(engine: Any) -> None:
    assert engine.profile.caches_prefixes
    prompt = "the same long beginning of every prompt " * 8
    before = engine.prefix_cache_stats()
    for question in ("one?", "two?"):  # one after the other: the second finds what the first has left
        answers(engine, [prompt + question])
    used = engine.prefix_cache_stats().since(before)
    assert used.queries == 2 * len(prompt + "one?")
    assert 128 <= used.hits < len(prompt)
    assert used.computed == used.queries - used.hits


@pytest.mark.parametrize("chars", [3_000, 60_000])
def test_a_prompt_that_is_too_long_is_split(engine: Any, chars: int) -> None:
    splitter = PromptSplitter(LongPrompts("split", chunk_overlap=4, reduce_template="{answers} in short"), engine)
    payload: Any = splitter.prepare("the canal feeds a mill and its wheel turns " * (chars // 40), None).payload
    assert len(payload.parts) > 1
    assert max(payload.costs) <= engine.room("a")

    async def answered(one: Any) -> Any:
        return (
            await run_chunks(one, lambda part, _: answered(part))
            if isinstance(one, Chunks)
            else await engine.infer(one)
        )

    result = asyncio.run(answered(payload))
    assert result["completion_tokens"] > len(payload.parts)
    assert result["prompt_tokens"] > sum(payload.costs)
