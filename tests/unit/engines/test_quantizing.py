"""A vector in fewer bits depends on nothing but itself, and keeps its direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from headrace.engines.networks.heads import VectorHead
from headrace.engines.networks.quantizing import OutputDtype, quantized
from headrace.engines.text.options import Embedding
from headrace.errors import ConfigError, RecordError

ROWS = np.random.default_rng(0).normal(size=(50, 384)).astype(np.float32)
ALL: tuple[OutputDtype, ...] = ("float32", "int8", "uint8", "binary", "ubinary")


def cosines(one: Any, other: Any) -> Any:
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.parametrize("wanted", ["binary", "ubinary"])
def test_bits_are_those_of_sentence_transformers(wanted: Any) -> None:
    found, expected = np.array(quantized(ROWS, wanted)), quantize_embeddings(ROWS, wanted)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_keeps_the_direction_at_any_length(size: float) -> None:
    rows = ROWS * np.float32(size)
    found = np.array(quantized(rows, "int8"))
    assert found.dtype == np.int8
    assert (np.abs(found.astype(int)).max(1) == 127).all()
    assert cosines(found.astype(float), ROWS.astype(float)).min() >= 0.999
    unsigned = np.array(quantized(rows, "uint8"))
    assert unsigned.dtype == np.uint8
    np.testing.assert_array_equal(unsigned.astype(int) - 128, found)


@pytest.mark.parametrize("wanted", ALL)
def test_a_vector_is_the_same_alone(wanted: Any) -> None:
    together = quantized(ROWS, wanted)
    for row, vector in zip(ROWS, together, strict=True):
        np.testing.assert_array_equal(quantized(row[None], wanted)[0], vector)


def test_zeros_and_a_length_that_8_does_not_divide() -> None:
    zeros = np.zeros((1, 10), np.float32)
    assert quantized(zeros, "int8")[0].tolist() == [0] * 10
    assert quantized(zeros + 1, "ubinary")[0].tolist() == [255, 0b11000000]
    assert quantized(zeros + 1, "binary")[0].tolist() == [127, 0b11000000 - 128]


@pytest.mark.parametrize("wanted", ALL[1:])
def test_a_vector_with_nan_fails_alone(wanted: Any) -> None:
    rows = ROWS[:3].copy()
    rows[1, 5] = np.nan
    good, bad, last = quantized(rows, wanted)
    assert isinstance(bad, RecordError)
    np.testing.assert_array_equal([good, last], quantized(ROWS[[0, 2]], wanted))


def test_bits_are_of_the_truncated_vector() -> None:
    head = VectorHead(16, normalize=True, output_dtype="ubinary")
    np.testing.assert_array_equal(head(ROWS)[0], np.packbits(ROWS[0, :16] > 0))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_dtype is 'int4'; it must be one of float32, int8"):
        Embedding(output_dtype="int4").check()
