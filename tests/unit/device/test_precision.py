"""Which outputs in fewer bits are good enough."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device.precision import Deviation, candidates, compare, likely_saving

NAN = float("nan")


def found(exact: list[Any], other: list[Any]) -> Deviation:
    deviation = compare(exact, other)
    assert deviation is not None
    return deviation


def vector(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def label(name: str, score: float = 0.9) -> dict[str, Any]:
    return {"label": name, "score": score}


def test_vectors_pass_by_their_least_cosine() -> None:
    exact = [vector(1, 0), vector(0, 2)]
    near = found(exact, [vector(1, 0.01), vector(0, 5)])
    assert near.passes
    assert str(near) == "cosine >= 0.999950 on 2 records"
    far = found(exact, [vector(1, 0.05), vector(0, 5)])  # 0.99875
    assert not far.passes and far.changed == 1
    assert found([vector(0, 0)], [vector(0, 0)]).passes
    assert not found([vector(0, 0)], [vector(0, 1)]).passes


@pytest.mark.parametrize(("records", "others", "passes"), [(1_000, 1, True), (1_000, 2, False), (999, 1, False)])
def test_one_label_of_a_thousand_may_be_another(records: int, others: int, passes: bool) -> None:
    exact = [label("a")] * records
    deviation = found(exact, [label("b", 0.5)] * others + [label("a")] * (records - others))
    assert deviation.passes is passes
    assert str(deviation) == f"{records - others:,} of {records:,} records with the same label, scores within 0.4"


def test_scores_pass_within_a_hundredth_of_their_range() -> None:
    assert found([0.2, 0.9], [0.205, 0.9]).passes
    assert not found([0.2, 0.9], [0.22, 0.9]).passes
    assert found([-10.0, 10.0], [-9.9, 10.0]).passes  # not between 0 and 1
    assert not found([-10.0, 10.0], [-9.7, 10.0]).passes


def test_a_sample_of_one_record_is_judged_as_any_other() -> None:
    assert str(found([vector(1)], [vector(2)])) == "cosine >= 1.000000 on 1 record"
    assert not found([label("a")], [label("b")]).passes


@pytest.mark.parametrize(
    ("exact", "other"),
    [(vector(1, 2), vector(1, NAN)), (0.5, math.inf), (label("a"), label("a", NAN)), (0.5, ValueError("x"))],
)
def test_nan_where_float32_had_a_number_never_passes(exact: Any, other: Any) -> None:
    deviation = found([exact] * 3, [other, exact, exact])
    assert not deviation.passes
    assert str(deviation) == "NaN or no output for 1 of 3 records"


def test_records_that_float32_cannot_do_either_do_not_count() -> None:
    assert found([ValueError("x"), NAN, 0.5], [0.1, 0.1, 0.5]).records == 1
    assert compare([ValueError("x")], [0.1]) is None


def test_outputs_of_another_kind_are_not_compared() -> None:
    assert compare(["a text"], ["a text"]) is None
    assert compare([], []) is None


def test_types_that_are_hardly_faster_are_not_tried() -> None:
    assert candidates({"bfloat16": 0.02}) == []
    assert candidates({"bfloat16": 5.0}) == ["bfloat16"]
    assert candidates({"bfloat16": 7.5, "float16": 8.0}) == ["bfloat16", "float16"]  # its range is that of float32
    assert candidates({"bfloat16": 0.5, "float16": 8.0}) == ["float16"]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=8), st.floats(0.1, 10))
def test_the_length_of_a_vector_does_not_matter(values: list[float], factor: float) -> None:
    exact = vector(*values)
    if np.abs(exact).max() > 1e-3:
        assert found([exact], [exact * np.float32(factor)]).worst == pytest.approx(1, abs=1e-5)


def test_what_a_dtype_saves_follows_amdahls_law() -> None:
    assert likely_saving(1.0) == 0.0
    assert likely_saving(3.0) == pytest.approx(0.5)
    assert likely_saving(math.inf) == 0.75  # the rest takes as long as before
    assert likely_saving(0.0) == 0.0  # not supported
