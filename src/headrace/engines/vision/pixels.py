"""Pixels of 8 bits, as images travel from the file to the device, and what a network computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.columns import RowNumbers

Pixels: TypeAlias = NDArray[np.float32]
"""One preprocessed image, of shape (channels, height, width)."""
RawPixels: TypeAlias = NDArray[np.uint8]
"""One or several images, of shape (..., height, width, 3)."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """(pixel * scale - mean) / std, as image processors compute it: the product in float64, the rest in float32."""

    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, raw: RawPixels) -> Pixels:
        """The network's input: (..., height, width, 3) becomes (..., 3, height, width)."""
        grades = (np.arange(256) * self.scale).astype(np.float32)
        values = np.empty((*raw.shape[:-3], 3, *raw.shape[-3:-1]), dtype=np.float32)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            table = (grades - np.float32(mean)) / np.float32(std)
            values[..., channel, :, :] = table[raw[..., channel]]
        return values


@dataclass(frozen=True, slots=True)
class PixelColumn:
    """The images of a block, of equal shape: a quarter of the bytes that a network computes with."""

    values: RawPixels
    """(rows, height, width, 3)."""
    normalization: Normalization

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int, /) -> Pixels:
        """One image, as `prepare` makes it."""
        return self.normalization(self.values[row])

    def take(self, rows: RowNumbers) -> PixelColumn:
        return PixelColumn(self.values[rows], self.normalization)

    @classmethod
    def joined(cls, pieces: Sequence[PixelColumn]) -> PixelColumn:
        if len(pieces) == 1:
            return pieces[0]
        return cls(np.concatenate([piece.values for piece in pieces]), pieces[0].normalization)
