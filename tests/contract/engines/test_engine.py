"""What jobs, servers and batchers rely on, whatever the engine: one contract, and every engine is held to it."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.engines.cases import ASKS, CASES, Case, Exported, Place, twins
from tests.contract.engines.fixtures import alone, assert_same, payloads, together

from headrace.engines.base import Prepared
from headrace.engines.capabilities import check_methods
from headrace.engines.choosing.registry import create, engine_names
from headrace.engines.profile import EngineProfile
from headrace.engines.tasks import known_tasks
from headrace.errors import EngineDeadError, RecordError
from headrace.io.formats.jsonl import JsonlWriter
from headrace.records import Ok, Record

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.onnx", "ignore::FutureWarning:copyreg"),
    # A machine that pauses looks like a loop that is blocked.
    pytest.mark.filterwarnings("ignore::headrace.BlockedLoopWarning"),
]
ROOT = Path(__file__).resolve().parents[3]


def test_every_engine_is_in_the_suite() -> None:
    for task in known_tasks():
        for name in engine_names(task):
            assert {"torch": task, "onnx": f"onnx-{task}", "static": "generate-static"}.get(name, name) in CASES


GENERATORS = [name for name, case in CASES.items() if case.good is ASKS]
BATCHING = {"batch": "batches", "step": "steps", "stream": "own"}


def test_its_profile_says_what_is_true_of_it(case: Case, engine: Any) -> None:
    profile = engine.profile
    assert isinstance(profile, EngineProfile)
    assert profile.batching == BATCHING[case.kind]
    check_methods(engine, profile)
    assert profile.followable == hasattr(engine, "follow")
    assert profile == pickle.loads(pickle.dumps(profile))
    largest = max(one.cost for one in engine.prepare(case.good))
    if not profile.counts_tokens:
        assert largest == 1
    elif profile.batching == "batches":
        assert largest <= profile.batch_cost


def test_it_describes_itself_in_json_the_same_each_time(engine: Any) -> None:
    described = engine.describe()
    assert json.loads(json.dumps(described)) == described == engine.describe()
    assert described["engine"]


def test_every_input_has_its_own_entry_in_order(case: Case, engine: Any) -> None:
    mixed = [value for pair in zip(case.good, case.bad, strict=False) for value in pair] + case.good + case.bad
    good = {id(value) for value in case.good}
    ready = engine.prepare(mixed)
    assert len(ready) == len(mixed)
    for value, one in zip(mixed, ready, strict=True):
        assert isinstance(one, Prepared if id(value) in good else RecordError), value
        if isinstance(one, Prepared):
            assert isinstance(one.cost, int)
            assert one.cost >= 1
        else:
            assert str(one)
            assert "\n" not in str(one)


def test_nothing_in_nothing_out(engine: Any) -> None:
    assert list(engine.prepare([])) == []
    assert together(engine, []) == []


def test_an_output_does_not_depend_on_its_company_or_its_place(case: Case, engine: Any) -> None:
    ready = payloads(engine, case.good)
    expected = alone(engine, ready)
    assert len(expected) == len(case.good)
    order = random.Random(4).sample(range(len(ready)), len(ready))
    shuffled = dict(zip(order, together(engine, [ready[place] for place in order]), strict=True))
    for outputs in (together(engine, ready), together(engine, ready[::-1])[::-1]):
        for left, right in zip(expected, outputs, strict=True):
            assert_same(left, right)
    for place, left in enumerate(expected):
        assert_same(left, shuffled[place])


def test_different_inputs_have_different_outputs_that_can_be_written(case: Case, engine: Any) -> None:
    outputs = together(engine, payloads(engine, case.good))
    rows = [JsonlWriter("output").encode([Ok(Record(0, 0, None), output)]) for output in outputs]
    assert all(len(row.splitlines()) == 1 for row in rows)
    assert rows[0] != rows[-1]


def test_the_whole_of_an_input_counts(case: Case, engine: Any) -> None:
    for pair in twins(case):
        one, other = together(engine, payloads(engine, list(pair)))
        assert repr(one) != repr(other), pair


@pytest.mark.parametrize("case", GENERATORS, indirect=True, scope="session")
def test_a_prompt_costs_the_tokens_that_its_answer_names(case: Case, engine: Any) -> None:
    ready = engine.prepare(case.good)
    answers = together(engine, [one.payload for one in ready])
    assert [one.cost for one in ready] == [answer["prompt_tokens"] for answer in answers]


def test_inputs_are_prepared_on_several_threads_while_it_runs(case: Case, engine: Any) -> None:
    expected = [one.cost for one in engine.prepare(case.good)]
    ready = payloads(engine, case.good)
    before = together(engine, ready)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(together, engine, ready)
        chunks = list(pool.map(engine.prepare, [case.good] * 8))
        after = running.result()
    assert all([one.cost for one in chunk] == expected for chunk in chunks)
    for left, right in zip(before, after, strict=True):
        assert_same(left, right)


def test_closed_it_says_so(case: Case, device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        engine = case.make(Place(tmp_path_factory.mktemp("closed"), device, stack))
        [ready, *_] = payloads(engine, case.good[:2])
        engine.close()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            use(engine, ready)


def use(engine: Any, payload: Any) -> None:
    if engine.profile.batching == "steps":
        engine.step()
    elif engine.profile.batching == "own":
        asyncio.run(engine.infer(payload))
    else:
        engine.forward([payload])


def numbers(outputs: list[Any]) -> Any:
    """All scores, in the order of the labels' names."""
    if isinstance(outputs[0], dict):
        return np.array([[score for _, score in sorted(zip(o["labels"], o["scores"], strict=True))] for o in outputs])
    return np.array(outputs)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("onnx-")], indirect=True)
def test_an_exported_model_gives_the_numbers_of_the_original(case: Case, engine: Any, tmp_path: Path) -> None:
    assert isinstance(case.make, Exported)
    with ExitStack() as stack:
        original = case.make.original(Place(tmp_path, "cpu", stack))
        ours, theirs = (together(one, payloads(one, case.good)) for one in (engine, original))
        assert np.abs(numbers(ours) - numbers(theirs)).max() < 1e-4
        assert [one.cost for one in engine.prepare(case.good)] == [one.cost for one in original.prepare(case.good)]
        assert engine.describe() != original.describe()
        original.close()


@pytest.mark.parametrize("case", ["onnx-classify"], indirect=True)
def test_an_exported_model_needs_no_pytorch(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "onnx-classify"
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from headrace.engines.choosing.registry import create\n"
        f"engine = create('classify', {str(folder)!r}, engine='onnx')\n"
        "print(engine.forward([one.payload for one in engine.prepare(['Return the running event loop.'])]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", check=True)
    assert "concurrency" in ended.stdout


@pytest.mark.parametrize("case", ["onnx-image-classify"], indirect=True)
def test_the_digest_is_of_the_onnx_file_too(
    engine: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shutil.copytree(tmp_path_factory.getbasetemp() / "onnx-image-classify", tmp_path / "another")
    another = create("image-classify", tmp_path / "another", engine="onnx")
    assert another.describe()["model_digest"] == engine.describe()["model_digest"]
    with (tmp_path / "another" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert another.describe()["model_digest"] != engine.describe()["model_digest"]
