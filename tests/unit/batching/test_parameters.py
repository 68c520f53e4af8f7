"""A parameter out of its range is refused at construction, with its name, its value and the range."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import DynamicBatcher
from headrace.errors import ConfigError

NAN, INF = float("nan"), float("inf")

WRONG: dict[str, tuple[list[Any], str]] = {
    "process_fn": ([None, 5, "echo"], "it must be a function"),
    "cost_estimator": ([5, "len"], "it must be a function or None"),
    "listener": ([5, []], "it must be a function or None"),
    "target_batch_cost": ([0, -1, NAN, INF, "many", None, True], "it must be a finite number > 0"),
    "max_batch_size": ([0, -1, 2.5, "8", None, True], "it must be an int >= 1"),
    "min_batch_size": ([0, -1, 2.5, None], "it must be an int >= 1"),
    "batch_timeout_s": ([-0.1, NAN, INF, "soon", None], "it must be a finite number >= 0"),
    "max_queue_size": ([0, -1, 2.5, None], "it must be an int >= 1"),
    "prefetch_batches": ([-1, 2.5, None], "it must be an int >= 0"),
    "default_cost": ([-1, NAN, INF, "1", None], "it must be a finite number >= 0"),
    "padded": (["no", 0, 1, None], "it must be one of False, True"),
    "length_bucketing": (["yes", -1, 2.5, None], "it must be an int >= 0"),
    "max_queue_cost": ([0, -1, NAN, "1"], "it must be a finite number > 0"),
    "max_concurrent_batches": ([0, -1, 1.5, None], "it must be an int >= 1"),
    "on_error": (["raise", None, 3, ["fail"]], "it must be one of 'fail', 'isolate'"),
    "oversized": (["refuse", None], "it must be one of 'alone', 'reject'"),
    "process_timeout_s": ([0, -1, NAN, "1"], "it must be a finite number > 0"),
    "offload": (["yes", 1, None], "it must be one of False, True"),
    "overlap": (["yes", 1, None], "it must be one of False, True"),
}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [(name, value, allowed) for name, (values, allowed) in WRONG.items() for value in values],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_range(name: str, value: Any, allowed: str) -> None:
    arguments = {"process_fn": list, name: value}
    with pytest.raises(ConfigError) as caught:
        DynamicBatcher(arguments.pop("process_fn"), **arguments)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == f"{name} is {value!r}: {allowed}"


def test_every_parameter_is_checked() -> None:
    parameters = set(DynamicBatcher.__init__.__annotations__) - {"return"}
    assert parameters == set(WRONG)


def test_a_batch_cannot_be_smaller_than_its_minimum() -> None:
    with pytest.raises(ConfigError, match="min_batch_size is 9: it must be <= max_batch_size, 8"):
        DynamicBatcher(list, min_batch_size=9, max_batch_size=8)


def test_a_misspelt_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="max_batch_sice"):
        DynamicBatcher(list, max_batch_sice=8)  # type: ignore[call-arg]


def test_every_parameter_but_the_function_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        DynamicBatcher(list, None)  # type: ignore[call-arg]
