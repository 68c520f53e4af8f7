"""How requests to vLLM end early, and how the engine itself ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.vllm.conftest import OPTIONS
from tests.processes import command_line, descendants

from headrace.engines.vllm.options import VllmGeneration
from headrace.errors import ConfigError, EngineDeadError, EngineError, TransientError

LONG = {"prompt": "hello", "max_tokens": 480, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 1}


def payloads(engine: Any, *values: Any) -> list[Any]:
    return [prepared.payload for prepared in engine.prepare(values)]


def core_processes() -> set[int]:
    """The processes of ours that hold models."""
    return {child.pid for child in descendants(os.getpid()) if "EngineCore" in command_line(child)}


def test_a_cancelled_request_leaves_its_slot(engine: Any) -> None:
    async def main() -> tuple[float, float]:
        long, short = payloads(engine, LONG, SHORT)
        await engine.infer(short)
        started = time.monotonic()
        await engine.infer(long)
        alone = time.monotonic() - started
        running = [asyncio.create_task(engine.infer(long)) for _ in range(OPTIONS["max_num_seqs"])]
        await asyncio.sleep(alone / 10)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        started = time.monotonic()
        await engine.infer(short)
        return alone, time.monotonic() - started

    alone, after_cancel = asyncio.run(main())
    assert after_cancel < alone / 2  # with every slot taken it would have waited for a long one


def test_the_engine_serves_one_event_loop_after_the_other(engine: Any) -> None:
    (short,) = payloads(engine, SHORT)
    assert asyncio.run(engine.infer(short)) == asyncio.run(engine.infer(short))


def test_an_engine_made_where_an_event_loop_runs_answers_another(model: Path) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    async def made() -> Any:
        return VllmEngine(VllmGeneration(model=model, chat=False, **OPTIONS))

    engine = asyncio.run(made())
    (short,) = payloads(engine, SHORT)
    assert asyncio.run(asyncio.wait_for(engine.infer(short), 30))["completion_tokens"] == 1
    engine.close()


def test_an_answer_can_be_followed_while_it_grows(engine: Any) -> None:
    heard: list[str] = []
    (payload,) = payloads(engine, {"prompt": "hello", "max_tokens": 20, "ignore_eos": True})
    answered = asyncio.run(engine.infer(engine.follow(payload, heard.append)))
    assert answered == asyncio.run(engine.infer(payload))
    assert len(heard) > 5
    assert all(later.startswith(text) for text, later in itertools.pairwise([*heard, answered["text"]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "VllmGeneration has no setting 'max_model_length'; did you mean max_model_len"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"dtype": "float33"}, "float33"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_options_that_vllm_does_not_take_are_refused(model: Path, options: dict[str, Any], message: str) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    with pytest.raises(ConfigError, match=message):
        VllmEngine(VllmGeneration(model=model, **options))


def test_a_model_that_cannot_be_loaded_is_an_error_with_its_folder(model: Path, tmp_path: Path) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineError, match=str(tmp_path)):
        VllmEngine(VllmGeneration(model=tmp_path, **OPTIONS))


def test_a_killed_core_ends_every_request_at_once_and_closing_returns(model: Path) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    others = core_processes()
    engine = VllmEngine(VllmGeneration(model=model, **OPTIONS))
    long, short = payloads(engine, LONG, SHORT)
    (core,) = core_processes() - others

    async def main() -> list[Any]:
        await engine.infer(short)
        running = [asyncio.create_task(engine.infer(long)) for _ in range(10)]
        await asyncio.sleep(0.1)
        os.kill(core, signal.SIGKILL)
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*running, return_exceptions=True)
            return [*ended, *await asyncio.gather(engine.infer(short), return_exceptions=True)]

    assert [type(error) for error in asyncio.run(main())] == [EngineDeadError] * 11
    engine.close()


def test_closing_ends_what_is_under_way_and_may_be_done_twice(model: Path) -> None:
    from headrace.engines.vllm.engine import VllmEngine

    engine = VllmEngine(VllmGeneration(model=model, **OPTIONS))
    long, short = payloads(engine, LONG, SHORT)

    async def main() -> None:
        await engine.infer(short)
        running = asyncio.create_task(engine.infer(long))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineDeadError, match="closed before it had answered"):
            await running
        with pytest.raises(EngineDeadError, match="create a new one"):
            await engine.infer(short)

    asyncio.run(main())
    engine.close()


def test_a_request_that_vllm_aborts_is_not_the_record_s_failure(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the core shuts down beside a job that stops: the record is left for the next run."""

    async def aborted(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(text="", finish_reason="abort")])

    (payload,) = payloads(engine, SHORT)
    monkeypatch.setattr(engine._core._engine, "generate", aborted)
    with pytest.raises(TransientError, match="aborted"):
        asyncio.run(engine.infer(payload))
