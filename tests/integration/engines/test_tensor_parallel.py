"""`tensor_parallel_size`: two processes over gloo give the answers of one, and end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.acceptance.command import end, headrace, start
from tests.waiting import until
from transformers import AutoTokenizer, CodeGenConfig, CodeGenForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from headrace import ContinuousBatcher
from headrace.device import placement
from headrace.engines.choosing.registry import create
from headrace.engines.generation import tensor_parallel
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.engines.generation.continuous import GenerationEngine
from headrace.engines.generation.options import Generation
from headrace.engines.networks.pytorch import load_pretrained
from headrace.errors import ConfigError, EngineDeadError

pytest.importorskip("accelerate")
SUMS = [f"{n * 37 % 500}+{n * 91 % 700}=" for n in range(40)]
ASKS: list[Any] = [
    *SUMS,
    {"prompt": "1+1=", "stop": ["2"], "min_tokens": 0},
    {"prompt": "12+30=", "max_tokens": 1},
    {"prompt": "77+5=", "temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 30},
    {"prompt": "9+9=", "repetition_penalty": 1.3, "ignore_eos": True, "max_tokens": 20},
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def answers(engine: GenerationEngine) -> list[Any]:
    """All at once, then again while some callers leave before their answer."""

    async def run() -> list[Any]:
        found = []
        for leaving in (0, 10):
            async with ContinuousBatcher(engine) as batcher:
                payloads = [one.payload for one in engine.prepare(ASKS)]  # type: ignore[union-attr]
                calls = [await batcher.submit(payload) for payload in payloads]
                for call in calls[:leaving]:
                    await asyncio.sleep(0.01)
                    call.cancel()
                found += await asyncio.gather(*calls[leaving:])
        return found

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def earlier() -> Iterator[None]:
    """Other tests of this process may have left processes, such as Ray's."""
    EARLIER.update(children(os.getpid()))
    yield
    EARLIER.clear()


EARLIER: set[int] = set()


def children(pid: int) -> list[int]:
    """The processes that its threads have started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    return sorted(found - EARLIER)


def run_steps(engine: GenerationEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic model; with one more token where transformers, 5.20 and before, cannot split its 99."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21):
        return ARITHMETIC
    folder = tmp_path_factory.mktemp("even")
    larger = LlamaForCausalLM.from_pretrained(ARITHMETIC)
    larger.resize_token_embeddings(100)
    larger.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ARITHMETIC).save_pretrained(folder)
    return folder


def test_two_processes_give_the_answers_of_one_and_a_dead_one_ends_both(model: Path) -> None:
    one = GenerationEngine(Generation(model=model, max_num_seqs=8))
    expected = answers(one)
    one.close()
    two = GenerationEngine(Generation(model=model, max_num_seqs=8, tensor_parallel_size=2))
    [rank] = children(os.getpid())
    with pytest.raises(ConfigError, match="another model of this process has tensor_parallel_size"):
        GenerationEngine(Generation(tensor_parallel_size=2))
    assert answers(two) == expected
    [prepared] = two.prepare([SUMS[0]])
    two.add(0, prepared.payload)  # type: ignore[union-attr]
    os.kill(rank, signal.SIGKILL)
    said = "tensor parallel of 2 processes: rank 1: the process was killed by SIGKILL"
    with pytest.raises(EngineDeadError, match=said):
        run_steps(two, 100)
    two.close()
    assert children(os.getpid()) == []
    assert not torch.distributed.is_initialized()


def test_a_job_whose_rank_dies_ends_in_one_line_and_goes_on(tmp_path: Path, model: Path) -> None:
    rows = [{"id": n, "text": f"{n}+{n * 7}="} for n in range(6_000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ("-i", "in.jsonl", "-o", "out.jsonl")
    command = ("run", "--task", "generate", "--model", model, *files, "--tensor-parallel-size", "2")
    job = start(*command, folder=tmp_path)
    until(lambda: any(tmp_path.glob("out.jsonl.parts/part-*")), of=job)
    [rank] = children(job.pid)
    os.kill(rank, signal.SIGKILL)
    status, said = end(job)
    assert status == 75
    assert "tensor parallel of 2 processes: rank 1: the process was killed by SIGKILL" in said.splitlines()[-1]
    status, said = headrace(*command[:-2], folder=tmp_path)  # on one device
    assert status == 0, said
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == list(range(6_000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 3}, "must divide the model's 4 attention heads; use 2 or 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be >= 1"),
        ({"tensor_parallel_size": 2, "device": "cuda:7"}, "cuda:7"),
        ({"tensor_parallel_size": 2, "dtype": "int3"}, "dtype 'int3' is unknown"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create("generate", **options)
    assert children(os.getpid()) == []


@pytest.mark.parametrize(("device", "refused"), [("cuda", False), ("auto", False), ("cuda:1", True)])
def test_devices_for_a_split_model_have_no_number(device: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in {"is_available": True, "init": None, "device_count": 2, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(placement, "grow_segments", lambda: None)
    with pytest.raises(ConfigError, match="needs 2 devices") if refused else nullcontext():
        assert tensor_parallel._device_kind(2, device) == "cuda"


def test_a_part_of_a_model_is_where_it_was_loaded(tmp_path: Path) -> None:
    class Loader:
        @staticmethod
        def from_pretrained(folder: str, **given: object) -> tuple[Any, dict[str, list[str]]]:
            assert given["tp"] == 2
            return LlamaModel(LlamaConfig(num_hidden_layers=0)).to("meta"), {"missing_keys": []}

    loader: Any = Loader
    _, place, _ = load_pretrained(loader, tmp_path, "cpu", "auto", {"tp": 2})
    assert place.type == "meta", "each rank has another device"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--task", "generate", "--engine", "static"), "--tensor-parallel-size: task 'generate' has no such option"),
        (("--task", "embed"), "is an option of engine 'vllm' (task 'embed') and engine 'torch' (task 'generate')"),
    ],
)
def test_an_engine_without_it_says_which_have_it(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1+1="}\n')
    files = ("-i", "in.jsonl", "-o", "out.jsonl")
    status, output = headrace("run", *files, *flags, "--tensor-parallel-size", "2", folder=tmp_path)
    assert status == 2
    assert said in output.splitlines()[-1]


def test_a_model_without_a_plan_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeGenConfig, "base_model_tp_plan", None)  # transformers 5.24 has one
    AutoTokenizer.from_pretrained(str(ARITHMETIC)).save_pretrained(str(tmp_path))
    CodeGenForCausalLM(CodeGenConfig(vocab_size=99, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="no tensor-parallel plan for models of type codegen; leave it out"):
        GenerationEngine(Generation(model=tmp_path, tensor_parallel_size=2))
