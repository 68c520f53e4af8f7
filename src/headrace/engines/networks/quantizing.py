"""Vectors in fewer bits: each is quantized by itself, without the others of its batch and without a calibration set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from headrace.engines.options import OutputDtype
from headrace.errors import RecordError

QuantizedVector: TypeAlias = NDArray[np.float32] | NDArray[np.int8] | NDArray[np.uint8]


def length_of(dimension: int, wanted: OutputDtype) -> int:
    """The number of values of a quantized vector: one per component, or one per 8 of them."""
    return -(-dimension // 8) if wanted in ("binary", "ubinary") else dimension


def quantized(rows: NDArray[np.float32], wanted: OutputDtype) -> Sequence[QuantizedVector | RecordError]:
    """One vector per row, all in one array; a list if there is an error, which a row with NaN or an infinity has unless
    it stays float32.

    int8: the largest component becomes 127 or -127, the others in proportion. uint8: the same plus 128.
    ubinary: one bit per component, 1 if it is positive, 8 to a byte; the last byte is filled with zeros.
    binary: the same minus 128.
    """
    if wanted == "float32":
        return cast("Sequence[QuantizedVector]", rows)
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    rows = np.where(finite[:, None], rows, 0)
    if wanted in ("binary", "ubinary"):
        unsigned = np.packbits(rows > 0, axis=1)
    else:
        largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
        scaled = rows.astype(np.float64) / np.where(largest > 0, largest, 1) * 127
        unsigned = (np.rint(scaled) + 128).astype(np.uint8)
    vectors = unsigned if wanted in ("uint8", "ubinary") else (unsigned ^ 128).view(np.int8)
    if finite.all():
        return cast("Sequence[QuantizedVector]", vectors)
    return [
        vector if good else RecordError(f"the vector holds NaN or an infinity, which {wanted} cannot hold")
        for vector, good in zip(vectors, finite, strict=True)
    ]
