"""What a function or engine may return, at every door: "What it returns" in docs/engines.md."""

from __future__ import annotations

import array
import asyncio
import itertools
import math
import re
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.examples import examples
from transformers.modeling_outputs import SequenceClassifierOutput

import headrace
from headrace import ContinuousBatcher, DynamicBatcher, EngineProfile, Prepared
from headrace.batching.passthrough import PassthroughBatcher
from headrace.errors import BadResultError
from headrace.events import BatchSplit
from headrace.jobs.settings import Limits

BATCH = 5

# A busy machine may stop any function for a while.
pytestmark = pytest.mark.filterwarnings("ignore::headrace.batching.dispatch.offload.BlockedLoopWarning")

Returned: TypeAlias = Callable[[list[int]], Any]
"""A user's function: the numbers of a batch in, anything out."""
Door: TypeAlias = Callable[[Returned, int], list[Any]]
"""Runs a function over the numbers below a bound, in batches of `BATCH`; gives each one's result or exception."""


# -- the doors -------------------------------------------------------------------------------------------------------


async def by_batcher(function: Callable[..., Any], count: int, **options: Any) -> list[Any]:
    async with DynamicBatcher[int, Any](
        function, max_batch_size=BATCH, batch_timeout_s=0, on_error="isolate", **options
    ) as batcher:
        return await asyncio.gather(*await batcher.submit_batch(range(count)), return_exceptions=True)


def batcher(function: Returned, count: int) -> list[Any]:
    return asyncio.run(by_batcher(function, count))


def async_batcher(function: Returned, count: int) -> list[Any]:
    async def awaited(batch: list[int]) -> Any:
        return function(batch)

    return asyncio.run(by_batcher(awaited, count))


def offloaded_batcher(function: Returned, count: int) -> list[Any]:
    async def awaited(batch: list[int]) -> Any:
        return function(batch)

    return asyncio.run(by_batcher(awaited, count, offload=True))


def function_of_a_coroutine(function: Returned, count: int) -> list[Any]:
    async def awaited(batch: list[int]) -> Any:
        return function(batch)

    def made(batch: list[int]) -> Any:
        return awaited(batch)

    return asyncio.run(by_batcher(made, count))


def mapped(function: Returned, count: int) -> list[Any]:
    found = headrace.map_batches(
        function, range(count), max_batch_size=BATCH, on_error="isolate", return_exceptions=True
    )
    return list(found)


def job(function: Any, count: int, **options: Any) -> list[Any]:
    rows: list[dict[str, Any]] = []
    headrace.run(
        [{"text": number} for number in range(count)],
        engine=function,
        sink=rows.extend,
        progress=False,
        limits=Limits(max_error_rate=1.0),
        **options,
    )
    rows.sort(key=lambda row: row["id"])
    return [row["output"] if "output" in row else made_error(row["error"]) for row in rows]


def made_error(told: dict[str, str]) -> Exception:
    kind: type[Exception] = BadResultError if told["reason"] == "BadResultError" else RuntimeError
    return kind(told["message"])


def job_of_a_function(function: Returned, count: int) -> list[Any]:
    return job(function, count, batch_size=BATCH)


class Whole:
    """A whole engine that calls a function."""

    profile = EngineProfile(batching="batches", cost_unit="records", batch_cost=BATCH, batch_size=BATCH)

    def __init__(self, function: Returned) -> None:
        self.forward = function

    def describe(self) -> dict[str, object]:
        return {}

    def prepare(self, inputs: Sequence[Any]) -> list[Any]:
        return [Prepared(value, cost=1) for value in inputs]

    def close(self) -> None:
        pass


def job_of_an_engine(function: Returned, count: int) -> list[Any]:
    return job(lambda model: Whole(function), count)


BATCHES: list[Door] = [
    batcher,
    async_batcher,
    offloaded_batcher,
    function_of_a_coroutine,
    mapped,
    job_of_a_function,
    job_of_an_engine,
]


class Steps:
    """Answers all that it holds in one step, with a function."""

    def __init__(self, function: Returned) -> None:
        self.function = function
        self.held: dict[int, int] = {}

    def span(self, record: int) -> tuple[float, float]:
        return 1, 1

    def add(self, key: int, record: int) -> None:
        self.held[key] = record

    def step(self) -> list[tuple[int, Any]]:
        held, self.held = self.held, {}
        return list(zip(held, self.function(list(held.values())), strict=True))

    def needs(self, key: int) -> float:
        return 1

    def remove(self, key: int) -> None:
        self.held.pop(key, None)


def steps(function: Returned, count: int) -> list[Any]:
    async def main() -> list[Any]:
        async with ContinuousBatcher[int, Any](Steps(function), max_slots=BATCH) as batcher:
            return await asyncio.gather(*await batcher.submit_batch(range(count)), return_exceptions=True)

    return asyncio.run(main())


def one_by_one(function: Returned, count: int) -> list[Any]:
    async def infer(record: int) -> Any:
        return next(iter(function([record])))

    async def main() -> list[Any]:
        async with PassthroughBatcher[int, Any](infer, max_in_flight=BATCH) as batcher:
            return await asyncio.gather(*await batcher.submit_batch(range(count)), return_exceptions=True)

    return asyncio.run(main())


def concurrent(function: Returned, count: int) -> list[Any]:
    async def main() -> list[Any]:
        found = headrace.map_concurrent(lambda item: next(iter(function([item]))), range(count), concurrency=1)
        return [result async for result in found]

    return asyncio.run(main())


def finished(function: Returned, count: int) -> list[Any]:
    return job(lambda batch: batch, count, finish=lambda row, output: next(iter(function([output]))))


EVERYWHERE: list[Door] = [*BATCHES, steps, one_by_one, concurrent, finished]


# -- a function that fills the same objects again ------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Open:
    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True)
class Shut:
    first: Any


class Named(dict[str, Any]):
    """A user's own mapping."""


class Column(list[Any]):
    """A user's own list."""


Leaf: TypeAlias = tuple[Any, Callable[[int], None], Callable[[Any], int]]
"""An object, what fills it with a number, and what reads the number from such an object."""


def filled_by_item(made: Any) -> Leaf:
    def fill(number: int) -> None:
        made[0] = number

    return made, fill, lambda found: int(found[0])


def zero_dimensional(made: Any) -> Leaf:
    def fill(number: int) -> None:
        made[...] = number

    return made, fill, int


def bytes_of_number() -> Leaf:
    made = bytearray(8)

    def fill(number: int) -> None:
        made[:] = number.to_bytes(8, "big")

    return made, fill, lambda found: int.from_bytes(found, "big")


def view_of_bytes() -> Leaf:
    made, fill, read = bytes_of_number()
    return memoryview(made), fill, read


def set_of_number() -> Leaf:
    made = {0}

    def fill(number: int) -> None:
        made.clear()
        made.add(number)

    return made, fill, lambda found: next(iter(found))


def image_of_number() -> Leaf:
    made = Image.new("I", (1, 1))
    return made, lambda number: made.putpixel((0, 0), number), lambda found: int(found.getpixel((0, 0)))


def structured() -> Leaf:
    made = np.zeros(1, [("at", "i8"), ("rest", "f4")])

    def fill(number: int) -> None:
        made["at"] = number

    return made[0], fill, lambda found: int(found["at"])


def series() -> Leaf:
    kept = np.zeros(2, np.int64)

    def fill(number: int) -> None:
        kept[:] = number

    return pd.Series(kept, copy=False), fill, lambda found: int(found.iloc[0])


def column(make: Callable[[Any], Any]) -> Callable[[], Leaf]:
    """A column over the memory of an array."""

    def made() -> Leaf:
        kept = np.zeros((4, 2))

        def fill(number: int) -> None:
            kept[:] = number

        return make(kept[1]), fill, lambda found: int(np.ravel(found.as_py() if hasattr(found, "as_py") else found)[0])

    return made


def arrow_backed(kept: Any) -> Any:
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([pa.array(kept)])))


def list_scalar(kept: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array([0, 2]), pa.array(kept))[0]


def of_lists(make: Callable[[list[Any]], Any]) -> Callable[[], Leaf]:
    """A column of objects, which are lists."""

    def made() -> Leaf:
        inner = [0]

        def fill(number: int) -> None:
            inner[0] = number

        return make([inner]), fill, lambda found: int(found[0][0])

    return made


def mapping(make: Callable[[dict[str, int]], Any]) -> Callable[[], Leaf]:
    def made() -> Leaf:
        kept = {"b": 0}

        def fill(number: int) -> None:
            kept["b"] = number

        return make(kept), fill, lambda found: int(found["b"])

    return made


class Readable(Mapping[str, Any]):
    """A user's own mapping, which cannot be changed."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def __getitem__(self, name: str) -> Any:
        return self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def objects() -> Leaf:
    inner = [0]
    made = np.empty(2, object)
    made[0] = inner

    def fill(number: int) -> None:
        inner[0] = number

    return made, fill, lambda found: int(found[0][0])


LEAVES: dict[str, Callable[[], Leaf]] = {
    "array": lambda: filled_by_item(np.zeros(3)),
    "part of an array": lambda: filled_by_item(np.zeros((4, 3))[1]),
    "array in other order": lambda: filled_by_item(np.zeros((4, 3))[:, 1]),
    "array of no dimension": lambda: zero_dimensional(np.zeros(())),
    "masked array": lambda: filled_by_item(np.ma.zeros(3)),
    "array of objects": objects,
    "row with names": structured,
    "tensor": lambda: filled_by_item(torch.zeros(3)),
    "part of a tensor": lambda: filled_by_item(torch.zeros(4, 3)[2]),
    "array of a tensor": lambda: filled_by_item(torch.zeros(3).numpy()),
    "tensor of an array": lambda: filled_by_item(torch.from_numpy(np.zeros(3))),
    "bfloat16": lambda: zero_dimensional(torch.zeros((), dtype=torch.float32)),
    "list": lambda: filled_by_item([0, "b", None]),
    "own list": lambda: filled_by_item(Column([0])),
    "UserList": lambda: filled_by_item(UserList([0])),
    "deque": lambda: filled_by_item(deque([0, 1])),
    "dict": lambda: filled_by_item({0: 0, "b": 1.5}),
    "own dict": lambda: filled_by_item(Named({"b": 1})),
    "OrderedDict": lambda: filled_by_item(OrderedDict([(0, 1)])),
    "defaultdict": lambda: filled_by_item(defaultdict(int)),
    "Counter": lambda: filled_by_item(Counter()),
    "UserDict": lambda: filled_by_item(UserDict()),
    "bytearray": bytes_of_number,
    "memoryview": view_of_bytes,
    "array.array": lambda: filled_by_item(array.array("q", [0])),
    "set": set_of_number,
    "image": image_of_number,
    "Series": series,
    "Series of Arrow": column(arrow_backed),
    "Series of objects": of_lists(lambda inner: pd.Series(inner, dtype=object)),
    "Series of polars": column(pl.Series),
    "Series of polars over Arrow": column(lambda kept: pl.Series(pa.array(kept))),
    "objects of polars": of_lists(lambda inner: pl.Series(values=inner, dtype=pl.Object)),
    "Arrow": column(pa.array),
    "part of Arrow": column(lambda kept: pa.array(kept.base.ravel())[2:4]),
    "chunks of Arrow": column(lambda kept: pa.chunked_array([pa.array(kept)])),
    "list of Arrow": column(list_scalar),
    "table of Arrow": column(lambda kept: pa.table({"a": pa.array(kept)})),
    "view of a dict": mapping(MappingProxyType),
    "ChainMap": mapping(ChainMap),
    "ChainMap of two": mapping(lambda kept: ChainMap({}, kept)),
    "own mapping": mapping(Readable),
}

NODES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "in a list": (lambda inner: [1, inner], lambda found: found[1]),
    "in an own list": (lambda inner: Column([inner]), lambda found: found[0]),
    "in a tuple": (lambda inner: ("a", inner), lambda found: found[1]),
    "in a named tuple": (lambda inner: Pair(None, inner), lambda found: found.right),
    "in a dict": (lambda inner: {"a": 1, "b": inner}, lambda found: found["b"]),
    "in an OrderedDict": (lambda inner: OrderedDict(b=inner), lambda found: found["b"]),
    "in a UserDict": (lambda inner: UserDict(b=inner), lambda found: found["b"]),
    "in a deque": (lambda inner: deque([inner]), lambda found: found[0]),
    "in a dataclass": (lambda inner: Open(1, inner), lambda found: found.second),
    "in a frozen dataclass": (Shut, lambda found: found.first),
    "in a view of a dict": (lambda inner: MappingProxyType({"b": inner}), lambda found: found["b"]),
    "in a ChainMap": (lambda inner: ChainMap({}, {"b": inner}), lambda found: found["b"]),
    "in objects of pandas": (lambda inner: pd.Series([inner], dtype=object), lambda found: found[0]),
    "in objects of polars": (
        lambda inner: pl.Series(values=[inner], dtype=pl.Object),
        lambda found: found[0],
    ),
    "in a model's output": (lambda inner: SequenceClassifierOutput(logits=inner), lambda found: found.logits),
}


class Refilling:
    """A function that has one object for each place of a batch, and fills it again in each call."""

    def __init__(self, leaf: str, around: Sequence[str], outer: Callable[[list[Any]], Any] = list) -> None:
        self.leaf = leaf
        self.places = [LEAVES[leaf]() for _ in range(BATCH)]
        self.kept = list(map(self.wrapped, [place[0] for place in self.places], itertools.repeat(around)))
        self.around = around
        self.outer = outer
        self.reused: list[Any] = []

    def wrapped(self, inner: Any, around: Sequence[str]) -> Any:
        for node in around:
            inner = NODES[node][0](inner)
        return inner

    def __call__(self, batch: list[int]) -> Any:
        for number, (_, fill, _) in zip(batch, self.places, strict=False):
            fill(number)
        self.reused[:] = self.kept[: len(batch)]
        return self.outer(self.reused)

    def read(self, found: Any) -> int:
        for node in reversed(self.around):
            found = NODES[node][1](found)
        return self.places[0][2](found)


shapes = st.tuples(st.sampled_from(list(LEAVES)), st.lists(st.sampled_from(list(NODES)), max_size=3))


@pytest.mark.parametrize("door", EVERYWHERE, ids=lambda door: door.__name__)
def test_an_object_that_is_filled_again_is_nobody_elses_row(door: Door) -> None:
    functions = itertools.cycle([Refilling(leaf, ["in a dict"]) for leaf in LEAVES])
    filled: dict[int, Refilling] = {}

    def function(batch: list[int]) -> Any:
        chosen = next(functions)
        filled.update(dict.fromkeys(batch, chosen))
        return chosen(batch)

    count = 3 * BATCH * len(LEAVES)
    wrong = {
        leaf
        for number, result in enumerate(door(function, count))
        if filled[number].read(result) != number
        for leaf in [filled[number].leaf]
    }
    assert not wrong
    assert len(filled) == count


@pytest.mark.parametrize("node", NODES)
def test_what_is_in_a_container_is_copied_with_it_and_of_its_type(node: str) -> None:
    function = Refilling("array", [node])
    found = mapped(function, 3 * BATCH)
    assert [function.read(result) for result in found] == list(range(3 * BATCH))
    assert {type(result) for result in found} == {type(function.kept[0])}


@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.sampled_from([list, tuple, deque, lambda given: given, UserList]))
def test_whatever_is_filled_again_is_nobody_elses_row(shape: tuple[str, list[str]], outer: Any) -> None:
    function = Refilling(*shape, outer)
    found = batcher(function, 2 * BATCH + 1)
    assert [function.read(result) for result in found] == list(range(2 * BATCH + 1))


class Buffer:
    """A function that returns rows of one array, which it keeps."""

    def __init__(self, made: Any, view: Callable[[Any], Any]) -> None:
        self.made = made
        self.view = view

    def __call__(self, batch: list[int]) -> Any:
        for place, number in enumerate(batch):
            self.made[place] = number
        return self.view(self.made[: len(batch)])


def rows_of(view: Any) -> Any:
    return list(view)


BUFFERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.zeros((BATCH, 3)), lambda view: view),
    "array of numbers": (lambda: np.zeros(BATCH), lambda view: view),
    "rows of an array": (lambda: np.zeros((BATCH, 3)), rows_of),
    "tensor": (lambda: torch.zeros(BATCH, 3), lambda view: view),
    "tensor of numbers": (lambda: torch.zeros(BATCH), lambda view: view),
    "rows of a tensor": (lambda: torch.zeros(BATCH, 3), rows_of),
    "array of a tensor": (lambda: torch.zeros(BATCH, 3), lambda view: view.numpy()),
    "tensor of an array": (lambda: np.zeros((BATCH, 3)), torch.from_numpy),
    "Series": (lambda: np.zeros(BATCH), lambda view: pd.Series(view, copy=False)),
    "Series of polars": (lambda: np.zeros(BATCH), pl.Series),
    "Arrow": (lambda: np.zeros(BATCH), pa.array),
    "list": (lambda: [0] * BATCH, lambda view: view),
    "array.array": (lambda: array.array("d", [0] * BATCH), lambda view: view),
}


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
@pytest.mark.parametrize(
    "column",
    [lambda lists: pl.Series(values=lists, dtype=pl.Object), lambda lists: pd.Series(lists, dtype=object)],
    ids=["polars", "pandas"],
)
def test_lists_in_a_column_that_are_filled_again_are_copied(door: Door, column: Any) -> None:
    kept = [[0] for _ in range(BATCH)]

    def function(batch: list[int]) -> Any:
        for inner, number in zip(kept, batch, strict=False):
            inner[0] = number
        return column(kept[: len(batch)])

    assert [result[0] for result in door(function, 3 * BATCH)] == list(range(3 * BATCH))


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_a_batch_that_is_filled_again_is_copied(door: Door) -> None:
    functions = itertools.cycle([Buffer(make(), view) for make, view in BUFFERS.values()])
    count = 3 * BATCH * len(BUFFERS)

    def function(batch: list[int]) -> Any:
        return next(functions)(batch)

    found = door(function, count)
    assert [float(np.ravel(result)[0]) for result in found] == list(range(count))


class Lazy(Sequence[Any]):
    """Computes a result when it is read, of the batch that its function had last."""

    def __init__(self) -> None:
        self.batch: list[int] = []

    def __call__(self, batch: list[int]) -> Lazy:
        self.batch = batch
        return self

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, place: Any) -> Any:
        return self.batch[place] * 2


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_a_lazy_sequence_is_read_before_the_next_call(door: Door) -> None:
    assert door(Lazy(), 3 * BATCH) == [2 * number for number in range(3 * BATCH)]


class Counting(np.ndarray):
    """An array that counts how often arrays of its class are copied."""

    copies = 0

    def copy(self, *given: Any, **named: Any) -> Any:
        type(self).copies += 1
        return super().copy(*given, **named)


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_an_array_is_copied_once_and_not_row_by_row(door: Door) -> None:
    calls: list[int] = []

    def function(batch: list[int]) -> Any:
        calls.append(len(batch))
        return np.array(batch)[:, None].view(Counting)

    Counting.copies = 0
    found = door(function, 3 * BATCH)
    assert [int(row[0]) for row in found] == list(range(3 * BATCH))
    assert Counting.copies == len(calls)


# -- a wrong type, a wrong number ---------------------------------------------------------------------------------


def frame(count: int) -> Any:
    return pd.DataFrame({"a": np.arange(count), "b": 1.5})


def generator(count: int) -> Iterator[int]:
    yield from range(count)


class Shapeless:
    """As a nested tensor: it has a shape, which raises."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no shape")


NO_RESULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "DataFrame": (frame, r"DataFrame of shape \(5, 2\)"),
    "DataFrame of one column": (lambda count: frame(count)[["a"]], r"DataFrame of shape \(5, 1\)"),
    "DataFrame of polars": (lambda count: pl.DataFrame({"a": range(count)}), r"DataFrame of shape \(5, 1\)"),
    "Table": (lambda count: pa.table({"a": range(count)}), r"Table of shape \(5, 1\)"),
    "RecordBatch": (lambda count: pa.record_batch({"a": range(count)}), r"RecordBatch of shape \(5, 1\)"),
    "Dataset": (lambda count: Dataset.from_dict({"a": range(count)}), r"Dataset of shape \(5, 1\)"),
    "dict": (lambda count: {str(number): number for number in range(count)}, "dict"),
    "model's output": (
        lambda count: SequenceClassifierOutput(logits=torch.zeros(count, 2)),
        "SequenceClassifierOutput",
    ),
    "str": (lambda count: "a" * count, "str"),
    "bytes": (lambda count: b"a" * count, "bytes"),
    "bytearray": (bytearray, "bytearray"),
    "memoryview": (lambda count: memoryview(b"a" * count), r"memoryview of shape \(5,\)"),
    "set": (lambda count: set(range(count)), "set"),
    "keys": (lambda count: dict.fromkeys(range(count)).keys(), "dict_keys"),
    "generator": (generator, "generator"),
    "map": (lambda count: map(str, range(count)), "map"),
    "None": (lambda count: None, "NoneType"),
    "number": (lambda count: 1.5, "float"),
    "array of no dimension": (np.array, r"ndarray of shape \(\)"),
    "tensor of no dimension": (torch.tensor, r"Tensor of shape \(\)"),
    "class": (lambda count: list, "type"),
    "object whose shape cannot be read": (lambda count: Shapeless(), "Shapeless"),
}


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_what_is_no_list_of_results_fails_all_records_at_once_with_its_type(door: Door) -> None:
    kinds = itertools.cycle(NO_RESULTS)  # a slow machine may form smaller batches, and more of them
    met: dict[int, tuple[str, int]] = {}

    def function(batch: list[int]) -> Any:
        kind = next(kinds)
        assert not met.keys() & set(batch), "no record runs twice"
        met.update(dict.fromkeys(batch, (kind, len(batch))))
        return NO_RESULTS[kind][0](len(batch))

    found = door(function, BATCH * len(NO_RESULTS))
    assert {kind for kind, _ in met.values()} == set(NO_RESULTS)
    for number, result in enumerate(found):
        kind, size = met[number]
        named = NO_RESULTS[kind][1].replace("5", str(size), 1)
        assert isinstance(result, BadResultError), (kind, result)
        assert re.search(f"returned {named} for batch of {size} records.*: return a list", str(result))


OTHER_COUNTS: dict[str, Callable[[int], Any]] = {
    "list": lambda count: [0] * count,
    "tuple": lambda count: (0,) * count,
    "array": lambda count: np.zeros((count, BATCH)),
    "tensor": lambda count: torch.zeros(count, BATCH + 1),
    "Series": lambda count: pd.Series([0] * count),
    "deque": lambda count: deque([0] * count),
}


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(BATCHES[:5]),
    st.sampled_from(list(OTHER_COUNTS)),
    st.integers(1, 17),
    st.integers(0, 12).filter(lambda count: count != BATCH),
)
def test_a_wrong_number_is_not_searched_for_a_part_that_fits(door: Door, kind: str, records: int, count: int) -> None:
    calls: list[int] = []

    def function(batch: list[int]) -> Any:
        calls.append(len(batch))
        return OTHER_COUNTS[kind](count)

    found = door(function, records)
    assert sum(calls) == records, "no record ran twice"
    at = 0
    for size in calls:
        for result in found[at : at + size]:
            if size == count:  # the last, smaller batch has the right number
                assert not isinstance(result, Exception)
            else:
                assert isinstance(result, BadResultError)
                assert f"returned {count} results for batch of {size} records" in str(result)
        at += size


@pytest.mark.parametrize("door", [job_of_a_function, job_of_an_engine], ids=lambda door: door.__name__)
def test_a_wrong_number_is_a_dead_letter_for_each_record_of_a_job(door: Door) -> None:
    found = door(lambda batch: torch.zeros(BATCH + 1, 4), 3 * BATCH)
    assert [type(result) for result in found] == [BadResultError] * 3 * BATCH
    assert all(f"returned {BATCH + 1} results for batch of " in str(result) for result in found)


def test_the_shape_is_told_with_a_wrong_number() -> None:
    [result, *_] = batcher(lambda batch: torch.zeros(40, 41), BATCH)
    assert "(Tensor of shape (40, 41))" in str(result)


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_a_function_that_drops_a_record_from_its_list_moves_no_other(door: Door) -> None:
    company: set[int] = set()

    def drops(batch: list[int]) -> list[int]:
        if 2 in batch:
            company.update(batch)
            batch.remove(2)
        return [10 * number for number in batch]

    for number, result in enumerate(door(drops, 2 * BATCH)):
        if number in company:
            assert isinstance(result, BadResultError)
        else:
            assert result == 10 * number
    assert 2 in company


@pytest.mark.parametrize("door", BATCHES, ids=lambda door: door.__name__)
def test_a_bad_record_is_still_found_by_halving(door: Door) -> None:
    def refuses(batch: list[int]) -> list[int]:
        if 2 in batch:
            raise LookupError("no such number")
        return [10 * number for number in batch]

    found = door(refuses, 2 * BATCH)
    assert [number for number, result in enumerate(found) if isinstance(result, Exception)] == [2]


def test_a_step_of_nonsense_is_not_searched_either() -> None:
    calls, splits = [0], []

    class Nonsense(Steps):
        def step(self) -> Any:
            calls[0] += 1
            self.held.clear()
            return {0: "a"}

    async def main() -> list[Any]:
        async with ContinuousBatcher[int, Any](
            Nonsense(list), max_slots=BATCH, on_error="isolate", listener=splits.append
        ) as batcher:
            return await asyncio.gather(*await batcher.submit_batch(range(BATCH)), return_exceptions=True)

    assert all(isinstance(result, BadResultError) for result in asyncio.run(main()))
    assert calls == [1]
    assert not any(isinstance(event, BatchSplit) for event in splits)


# -- what is passed on, and what cannot be copied ------------------------------------------------------------------


class Stuck:
    """It has a shape, and cannot be copied."""

    shape = (1,)

    def copy(self) -> Stuck:
        raise TypeError("there is only one")


@pytest.mark.parametrize("door", [batcher, mapped, steps, job_of_a_function], ids=lambda door: door.__name__)
def test_what_cannot_be_copied_fails_its_record_alone(door: Door) -> None:
    found = door(lambda batch: [{"v": Stuck()} if number == 1 else number for number in batch], BATCH)
    assert isinstance(found[1], BadResultError)
    assert "returned a result of type dict that cannot be copied: TypeError: there is only one" in str(found[1])
    assert [found[0], *found[2:]] == [0, *range(2, BATCH)]


def test_an_object_of_another_class_is_passed_on_as_it_is() -> None:
    kept = [object() for _ in range(BATCH)]
    assert mapped(lambda batch: [kept[number] for number in batch], BATCH) == kept


@settings(max_examples=examples(50), deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
       lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner)))  # fmt: skip
def test_a_copy_is_equal_and_of_the_same_types(value: Any) -> None:
    [found] = batcher(lambda batch: [value], 1)
    assert (repr(found), type(found)) == (repr(value), type(value))


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint64", "bool", "complex64", "M8[ns]", "U3"]
)
def test_an_array_keeps_its_type_and_values(dtype: str) -> None:
    made = np.array([[0, 1], [1, 0]]).astype(dtype)
    found = mapped(lambda batch: made[: len(batch)], 2)
    assert [row.dtype for row in found] == [made.dtype] * 2
    assert all(row.tolist() == whole.tolist() for row, whole in zip(found, made, strict=True))


def test_a_tensor_keeps_its_type_device_and_gradient() -> None:
    made = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    found = mapped(lambda batch: made * 2, 2)
    assert [(row.dtype, row.requires_grad) for row in found] == [(torch.bfloat16, True)] * 2
    assert math.isclose(float(found[0].sum().detach()), 6)


# -- what comes in -------------------------------------------------------------------------------------------------


class Filling:
    """A dataset that has one row, and fills it again."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {"text": np.zeros(1)}

    def __len__(self) -> int:
        return 200

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place >= len(self):
            raise IndexError(place)
        self.row["text"][0] = place
        return self.row


def one_row_again() -> Iterator[dict[str, Any]]:
    filling = Filling()
    yield from (filling[place] for place in range(200))


async def one_row_again_async() -> Any:
    for row in one_row_again():
        yield row


@pytest.mark.parametrize("rows", [one_row_again, one_row_again_async, Filling()], ids=["iterator", "async", "dataset"])
def test_a_row_that_is_filled_again_is_read_before(rows: Any) -> None:
    taken: list[dict[str, Any]] = []
    headrace.run(rows, engine=lambda batch: [int(value[0]) for value in batch], sink=taken.extend, progress=False)
    assert [row["output"] for row in taken] == list(range(200))


def test_a_prepare_that_fills_its_row_again_mixes_no_rows() -> None:
    kept: dict[str, Any] = {}

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        kept["text"] = row["text"] + 1
        return kept

    assert job(sorted, 200, prepare=prepare) == list(range(1, 201))


def test_equal_records_do_not_share_the_output_that_finish_changes() -> None:
    def finish(row: dict[str, Any], output: dict[str, int]) -> dict[str, int]:
        output["seen"] += 1
        return output

    taken: list[dict[str, Any]] = []
    rows = [{"text": "a"}] * 100
    headrace.run(
        rows, engine=lambda batch: [{"seen": 0} for _ in batch], finish=finish, dedupe=True, sink=taken.extend,
        progress=False,
    )  # fmt: skip
    assert [row["output"] for row in taken] == [{"seen": 1}] * 100
