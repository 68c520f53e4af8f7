"""Generation with a small real Llama: the same answers whatever the batching, parameters of each record, bad input."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import ContinuousBatcher
from headrace.device.step_sizes import StepSize
from headrace.engines.choosing import registry
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError
from headrace.events import Event, StepDone, StepSizeChanged

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 160
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with letters for tokens. Its logits are far apart: rounding decides nothing."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from headrace.engines.generation.causal_lm import ARITHMETIC

    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(str(ARITHMETIC))
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        eos_token_id=1,
        pad_token_id=0,
    )
    target = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(target)
    words.save_pretrained(target)
    return target


def requests(count: int, **sampling: Any) -> list[dict[str, Any]]:
    """Prompts and answers of very different lengths."""
    rng = random.Random(1)
    return [
        {
            "prompt": "".join(rng.choices(LETTERS, k=rng.randint(1, 60))),
            "max_tokens": rng.choice([1, 3, 10, 30, 80]),
            "ignore_eos": True,
            **sampling,
        }
        for _ in range(count)
    ]


def payloads(engine: Any, inputs: list[Any]) -> list[Any]:
    prepared = engine.prepare(inputs)
    assert not [item for item in prepared if isinstance(item, Exception)]
    return [item.payload for item in prepared]


def answers(engine: Any, inputs: list[Any], events: list[Event] | None = None) -> list[Any]:
    """Through a continuous batcher, in order."""

    async def main() -> list[Any]:
        listener = None if events is None else events.append
        async with ContinuousBatcher(
            engine, max_slots=engine.profile.max_in_flight, max_cost=engine.profile.max_cost, listener=listener
        ) as batcher:
            asks = payloads(engine, inputs)
            return [answer async for answer in batcher.map(asks, return_exceptions=True)]

    return asyncio.run(main())


def alone(engine: Any, inputs: list[Any]) -> list[Any]:
    return [engine.forward([ask])[0] for ask in payloads(engine, inputs)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}, {"frequency_penalty": 1.5}], ids=str)
def test_answers_are_the_same_whatever_the_batching(folder: Path, sampling: Any) -> None:
    inputs = requests(24, **sampling)
    static = registry.create("generate", folder, engine="static")
    engine = registry.create("generate", folder, max_num_seqs=16)
    expected = alone(static, inputs)
    assert {len(answer["text"]) for answer in expected} >= {1, 3, 10, 30}
    assert answers(engine, inputs) == expected
    assert [
        answer for start in range(0, 24, 16) for answer in static.forward(payloads(static, inputs[start : start + 16]))
    ] == expected
    order = random.Random(2).sample(range(24), 24)
    assert answers(engine, [inputs[place] for place in order]) == [expected[place] for place in order]


@pytest.mark.parametrize("kind", ["grouped", "sliding"])
def test_answers_are_the_same_where_heads_share_keys_and_where_layers_see_a_window(tmp_path: Path, kind: str) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    from headrace.engines.generation.causal_lm import ARITHMETIC
    from headrace.engines.generation.paged_attention import NAME

    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(str(ARITHMETIC))
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 800,
        "initializer_range": 0.4,
    }
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if kind == "grouped"
        else MistralForCausalLM(MistralConfig(**sizes, sliding_window=40))
    )
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    long = {"prompt": LETTERS * 19, "max_tokens": 20, "ignore_eos": True}  # read in several steps, beside the others
    inputs = [*requests(9), long, *requests(3)]
    engine = registry.create("generate", tmp_path, max_num_seqs=8)
    assert engine._lm.model.config._attn_implementation == NAME
    assert answers(engine, inputs) == alone(registry.create("generate", tmp_path, engine="static"), inputs)


def test_answers_that_were_sent_back_are_the_same_too(folder: Path) -> None:
    inputs = [{**request, "max_tokens": 90} if number > 20 else {**request, "max_tokens": 90, "stop": list(LETTERS)}
              for number, request in enumerate(requests(36, temperature=0.5))]  # fmt: skip
    engine = registry.create("generate", folder, max_num_seqs=16, kv_cache_tokens=400)
    events: list[Event] = []
    results = answers(engine, inputs, events)
    assert sum(event.sent_back for event in events if isinstance(event, StepDone)) > 0
    assert results == alone(registry.create("generate", folder, engine="static"), inputs)


def test_all_of_the_cache_is_free_again(folder: Path) -> None:
    engine = registry.create("generate", folder, max_num_seqs=4)
    free = engine._scheduler.pages.available

    async def main() -> None:
        async with ContinuousBatcher(engine, max_slots=4, max_cost=engine.profile.max_cost) as batcher:
            futures = [await batcher.submit(ask) for ask in payloads(engine, requests(4, min_tokens=1))]
            endless = await batcher.submit(
                payloads(engine, [{"prompt": "a", "max_tokens": 150, "ignore_eos": True}])[0]
            )
            await asyncio.gather(*futures)
            assert batcher.stats.in_flight == 1
            endless.cancel()

    asyncio.run(main())
    assert engine._scheduler.pages.available == free
    assert not engine._answers


def test_a_seed_decides_and_belongs_to_its_record(folder: Path) -> None:
    engine = registry.create("generate", folder)
    ask = {"prompt": "abc", "temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    seeded = [{**ask, "seed": seed} for seed in (1, 2, 1)]
    one, two, one_again, plain, plain_again = answers(engine, [*seeded, ask, ask])
    assert one == one_again != two
    assert plain == plain_again  # the same prompt and engine seed
    [other] = answers(registry.create("generate", folder, seed=5), [ask])
    assert other != plain


def test_top_k_of_one_is_greedy_whatever_the_temperature(folder: Path) -> None:
    engine = registry.create("generate", folder)
    ask = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True}
    greedy, *drawn = answers(engine, [ask, *({**ask, "temperature": 2.0, **one} for one in ONLY_ONE)])
    assert drawn == [greedy] * len(ONLY_ONE)


ONLY_ONE: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]


def test_a_penalty_keeps_tokens_from_coming_back(folder: Path) -> None:
    engine = registry.create("generate", folder)
    ask = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}
    plain, punished = answers(engine, [ask, {**ask, "presence_penalty": 2.0, "frequency_penalty": 2.0}])
    assert len(set(punished["text"])) > len(set(plain["text"]))


@pytest.mark.parametrize(
    ("penalty", "generated", "chosen"),
    [
        ({"frequency_penalty": 0.5}, [2], 2),  # 3.0 - 0.5 is still the highest
        ({"frequency_penalty": 0.5}, [2, 2, 2], 1),  # 3.0 - 1.5 is not: each time counts
        ({"presence_penalty": 0.5}, [2, 2, 2], 2),  # once, however often
        ({"presence_penalty": 1.5}, [2], 1),
        ({"presence_penalty": 1.5}, [0], 2),  # of tokens that were generated; 2 is in the prompt alone
        ({"repetition_penalty": 1.2}, [0], 2),
        ({"repetition_penalty": 2.0}, [0], 1),  # of the prompt's tokens too
    ],
)
def test_how_much_a_penalty_takes(penalty: dict[str, float], generated: list[int], chosen: int) -> None:
    import torch

    from headrace.engines.generation.sampling import TokenSampler, choose
    from headrace.engines.requests.generation import Sampling

    sampler = TokenSampler(Sampling(**penalty), [2], 0, frozenset())  # type: ignore[arg-type]
    assert choose(torch.tensor([[0.0, 2.0, 3.0]]), [sampler], [generated]) == [chosen]


def test_an_end_token_waits_for_the_fewest_tokens_asked_for() -> None:
    import torch

    from headrace.engines.generation.sampling import TokenSampler, choose
    from headrace.engines.requests.generation import Sampling

    sampler = TokenSampler(Sampling(min_tokens=2), [1], 0, frozenset({2}))
    assert [sampler.changes(count) for count in range(4)] == [True, True, False, False]
    logits = torch.tensor([[0.0, 2.0, 3.0]] * 3)
    assert choose(logits, [sampler] * 3, [[0] * count for count in range(3)]) == [1, 1, 2]


@pytest.mark.parametrize("name", ["torch", "static"])
def test_how_answers_end(folder: Path, name: str) -> None:
    engine = registry.create("generate", folder, engine=name)

    def run(*asks: dict[str, Any]) -> list[Any]:
        if name == "torch":
            return answers(engine, list(asks))
        return list(engine.forward(payloads(engine, list(asks))))

    [whole] = run({"prompt": "abc", "max_tokens": 40, "ignore_eos": True})
    assert (whole["finish_reason"], whole["prompt_tokens"], whole["completion_tokens"]) == ("length", 3, 40)
    stop = whole["text"][10:13]
    place = whole["text"].index(stop)
    stopped, later, ended, full = run(
        {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stop": [stop, "never there"]},
        {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stop": whole["text"][0], "min_tokens": 2},
        {"prompt": "abc", "max_tokens": 150, "temperature": 5.0, "seed": 0},
        {"prompt": "x" * (CONTEXT - 5), "max_tokens": 100, "ignore_eos": True},
    )
    assert stopped == {
        "text": whole["text"][:place],
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": place + len(stop),
    }
    assert len(later["text"]) >= 1  # the first letter alone would have ended it
    assert ended["finish_reason"] == "stop"  # so hot, it comes upon an end token
    assert len(ended["text"]) < ended["completion_tokens"] < 150
    assert (full["finish_reason"], full["completion_tokens"]) == ("length", 5)  # the end of the context


def test_what_cannot_be_answered_is_that_records_error(folder: Path) -> None:
    engine = registry.create("generate", folder, chat=True)
    bad = [None, "", "x" * 400, "\ud800", [{"role": "wizard", "content": "x"}], {"prompt": "a", "top_p": 2}]
    good = ["1+1=", [{"role": "user", "content": "1+1="}], {"prompt": "Q: 1+1=\nA: "}]
    prepared = engine.prepare([*bad, *good])
    assert all(isinstance(item, RecordError) for item in prepared[: len(bad)])
    assert "leaves no room for an answer in a context of 160" in str(prepared[2])
    assert len({item.payload.prompt for item in prepared[len(bad) :]}) == 1  # three ways to ask the same


def test_a_role_that_the_models_template_refuses_is_that_records_error(folder: Path) -> None:
    [refused] = registry.create("generate", folder).prepare([[{"role": "tool", "content": "4"}]])
    assert isinstance(refused, RecordError)
    assert "template" in str(refused)


def test_a_model_without_a_template_takes_prompts_only(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    prompt, chat = registry.create("generate", tmp_path).prepare(["1+1=", [{"role": "user", "content": "1+1="}]])
    assert not isinstance(prompt, Exception)
    assert isinstance(chat, RecordError)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_token": 3}, ConfigError, "max_token: task 'generate' has no such option"),
        ({"temperature": -1}, ConfigError, "temperature is -1"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        ({"kv_cache_tokens": 10}, ConfigError, "kv_cache_tokens is 10"),
        ({"kv_cache_tokens": 10**9}, EngineError, "no room for a cache of 1,000,00"),
        ({"max_model_len": 10_000}, ConfigError, "max_model_len is 10000"),
        ({"device": "abacus"}, ConfigError, "abacus"),
    ],
)
def test_wrong_options_name_themselves(folder: Path, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.create("generate", folder, **options)


@pytest.mark.parametrize("name", ["torch", "static"])
def test_a_folder_that_lacks_something_says_what(folder: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    def without(file: str) -> Path:
        target = tmp_path / f"without-{file}"
        return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns(file)))

    for file, words in (
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=words):
            registry.create("generate", without(file), engine=name)
    for layer in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        weights = load_file(folder / "model.safetensors")
        del weights[layer]
        target = Path(shutil.copytree(folder, tmp_path / layer))
        save_file(weights, target / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineError, match=f"holds no weights for {layer}"):
            registry.create("generate", target, engine=name)


def test_a_model_that_cannot_generate_says_so(encoder_folder: Path) -> None:
    with pytest.raises(EngineError, match="model in"):
        registry.create("generate", encoder_folder)


@pytest.mark.parametrize(("name", "reason"), [("Bloom", "its attention"), ("Lfm2", "layers of type conv")])
def test_a_model_that_cannot_be_batched_continuously_says_so(
    folder: Path, tmp_path: Path, name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "intermediate_size": 64, "layer_types": ["conv", "full_attention"]}
    config = getattr(transformers, f"{name}Config")(
        **small, **(more if name == "Lfm2" else {}), eos_token_id=1, pad_token_id=0
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    engine = registry.create("generate", tmp_path, max_model_len=64)
    assert engine.profile.batching == "batches"
    assert [one["finish_reason"] for one in engine.forward(payloads(engine, ["abc"]))] == ["length"]
    assert reason in caplog.text
    with pytest.raises(EngineError, match=rf"continuously: .*{reason}.*use the engine static, or vllm"):
        registry.create("generate", tmp_path, max_model_len=64, kv_cache_tokens=640)


@pytest.mark.parametrize("name", ["torch", "static"])
def test_engines_keep_their_types_promises(folder: Path, name: str) -> None:
    engine = registry.create("generate", folder, engine=name)
    assert engine.profile.batching == ("steps" if name == "torch" else "batches")
    assert json.loads(json.dumps(engine.describe())) == engine.describe()
    assert engine.describe() != registry.create("generate", folder, engine=name, temperature=0.1).describe()
    [ask] = payloads(engine, ["abc"])
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError):
        engine.forward([ask]) if name == "static" else engine.step()


def test_a_job_finds_the_size_of_its_steps_and_gives_the_same_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engines.generation import paging

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(paging._START, "cpu", StepSize(2, 64))
    rows = requests(80, max_tokens=12, temperature=0.7)
    events: list[Event] = []

    def answered(name: str, **options: Any) -> tuple[str, Any]:
        out = tmp_path / name
        records = [{"id": number, "text": row} for number, row in enumerate(rows)]
        report = headrace.run(
            records, str(folder), sink=str(out), task="generate", progress=False, listeners=[events.append], **options
        )
        return out.read_text(), report

    expected, fixed = answered("set.jsonl", max_num_seqs=9, max_num_batched_tokens=64)
    assert fixed.step_size is None and not any(isinstance(event, StepSizeChanged) for event in events)
    found, report = answered("found.jsonl")
    assert found == expected
    assert (fixed.host.slots, report.host.slots, report.slots_full) == (9, 0, 0), "no advice on what the job finds"
    assert report.step_size.answers >= 4, "two answers at once leave much of a step to its own cost"
    assert max(event.size for event in events if isinstance(event, StepDone)) >= 4
    events.clear()
    again, _ = answered("again.jsonl")
    assert again == expected
    first = next(event.size for event in events if isinstance(event, StepDone))
    assert first >= 4, "the next job begins with it"


def test_a_folder_here_comes_before_the_included_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(registry.__file__).parents[2] / "models" / "arithmetic", tmp_path / "arithmetic")
    monkeypatch.chdir(tmp_path)
    engine = registry.create("generate", "arithmetic", engine="static")
    found = registry.folder_of("generate", "arithmetic", "static")  # which a job's identity is made of
    assert engine._lm._folder == found == (tmp_path / "arithmetic").resolve()
