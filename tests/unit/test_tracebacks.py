"""A Python user sees their own line and the error; what their own code raised keeps its traceback."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.client import Client, ClientSettings
from headrace.errors import ConfigError, HeadraceError

ROWS = [{"id": 1, "text": "a"}, {"id": 1, "text": "b"}]
INSTALLED = str(Path(headrace.__file__).parent)


def lengths(batch: list[object]) -> list[int]:
    return [len(str(value)) for value in batch]


def job(folder: Path, **options: object) -> object:
    options = {"engine": lengths, "progress": False, **options}
    return headrace.run(ROWS, sink=folder / "out.jsonl", **options)  # type: ignore[call-overload]


def shared(call: Callable[[headrace.DynamicBatcher[object, object]], object]) -> object:
    """What a call of a thread on a running batcher gives."""

    async def on_thread() -> object:
        async with headrace.DynamicBatcher[object, object](lambda batch: None) as batcher:  # type: ignore[arg-type,return-value]
            return await asyncio.to_thread(call, batcher)

    return asyncio.run(on_thread())


def unreachable(call: Callable[[Client], object]) -> object:
    """What a call gives where nobody listens."""
    with Client("http://127.0.0.1:9", settings=ClientSettings(attempts=1)) as client:
        return call(client)


CALLS: dict[str, Callable[[Path], object]] = {
    "run": job,
    "run with an unknown column": lambda folder: job(folder, text_column="nope"),
    "run with an unknown option": lambda folder: job(folder, id_columm="id"),
    "run with another engine": lambda folder: job(folder, engine="no_module:function"),
    "build_app": lambda folder: headrace.build_app("nope"),
    "map_batches, wrong option": lambda folder: headrace.map_batches(lengths, ["a"], max_batch_size=0),
    "map_batches, wrong result": lambda folder: list(headrace.map_batches(lambda batch: None, ["a"])),  # type: ignore[arg-type,return-value]
    "map_concurrent": lambda folder: headrace.map_concurrent(lengths, ROWS, concurrency=0),
    "client": lambda folder: Client("ftp://nowhere"),
    "client.post": lambda folder: unreachable(lambda client: client.post("/x", {})),
    "client.map": lambda folder: unreachable(lambda client: list(client.map("/x", [{}]))),
    "submit_blocking": lambda folder: shared(lambda batcher: batcher.submit_blocking(1)),
    "map_blocking": lambda folder: shared(lambda batcher: list(batcher.map_blocking([1]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_shows_the_users_lines_alone(name: str, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError) as caught:
        CALLS[name](tmp_path)
    said = "".join(traceback.format_exception(caught.value))
    assert INSTALLED not in said
    assert "During handling" not in said
    assert "direct cause" not in said
    assert __file__ in said
    assert said.count(type(caught.value).__name__) == 1


def test_what_the_users_rows_raise_keeps_its_traceback(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise KeyError("of the user")

    with pytest.raises(HeadraceError) as caught:
        headrace.run(rows, sink=tmp_path / "out.jsonl", engine=lengths, progress=False)
    said = "".join(traceback.format_exception(caught.value))
    assert "direct cause" in said
    assert 'raise KeyError("of the user")' in said
    assert "During handling" not in said


def test_what_is_no_error_of_headrace_keeps_all_its_frames(tmp_path: Path) -> None:
    """It comes from user code, or shows a fault."""

    def fails(batch: list[str]) -> list[int]:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user") as caught:
        list(headrace.map_batches(fails, ["a"]))
    said = "".join(traceback.format_exception(caught.value))
    assert 'raise ValueError("of the user")' in said
    assert INSTALLED in said


def test_a_job_in_an_async_function_is_refused_as_it_blocks_the_loop(tmp_path: Path) -> None:
    async def route() -> object:
        return headrace.run([{"text": "a"}], sink=tmp_path / "out.jsonl", engine=lengths, progress=False)

    with pytest.raises(ConfigError, match=r"await headrace\.arun\("):
        asyncio.run(route())
    assert not (tmp_path / "out.jsonl").exists(), "nothing was begun"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(tmp_path, id_column="", overwrite=True)

        async def way_out() -> object:
            return await asyncio.to_thread(job, tmp_path, id_column="", overwrite=True)

        asyncio.run(way_out())


def test_an_error_within_a_running_loop_is_as_short(tmp_path: Path) -> None:
    async def route() -> None:
        job(tmp_path, text_column="nope")

    with pytest.raises(ConfigError) as caught:
        asyncio.run(route())
    assert INSTALLED not in "".join(traceback.format_exception(caught.value))
