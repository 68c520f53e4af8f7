"""The tokens of many texts, one after the other in one array: what is prepared for a block, and what a batch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.columns import PreparedColumn, RowNumbers

Tokens: TypeAlias = NDArray[np.int32]
"""One tokenized text: row 0 has the token ids, row 1 the token types if the model uses them. See also `expanded`."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of some texts: `Payloads` of engines of texts."""

    flat: Tokens
    """The tokens of all texts, with the same rows as those of one."""
    offsets: NDArray[np.int64]
    """Where each text begins, and where the last one ends."""
    expanded: NDArray[np.bool_] | None = None
    """Which texts have tokens that may not be attended to; the last row of `flat` then says which are, and counts for
    these texts alone. None if no text has."""

    @classmethod
    def of(cls, texts: Sequence[Tokens], rows: int) -> TokenRows:
        """Single texts as one.

        Args:
            texts: in any number.
            rows: how many a text has; one with a row more is expanded.
        """
        expanded = [len(tokens) > rows for tokens in texts]
        if any(expanded):
            texts = [_attended(tokens, rows + 1) for tokens in texts]
        flat = np.concatenate(texts, axis=1) if texts else np.zeros((rows, 0), dtype=np.int32)
        lengths = [tokens.shape[1] for tokens in texts]
        return cls(flat, offsets_of(lengths), np.array(expanded) if any(expanded) else None)

    @property
    def nbytes(self) -> int:
        marks = 0 if self.expanded is None else self.expanded.nbytes
        return self.flat.nbytes + self.offsets.nbytes + marks

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def attended(self) -> NDArray[np.int32] | None:
        """For each token, whether it is attended to: 1 or 0; None if all are."""
        if self.expanded is None:
            return None
        return np.where(np.repeat(self.expanded, self.lengths), self.flat[-1], 1)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tokens:
        """A copy of one text's tokens, which does not keep those of the others."""
        rows = len(self.flat) - (self.expanded is not None and not self.expanded[row])
        return self.flat[:rows, self.offsets[row] : self.offsets[row + 1]].copy()

    def take(self, rows: RowNumbers) -> TokenRows:
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = offsets_of(lengths)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return TokenRows(
            self.flat.take(places, axis=1), offsets, None if self.expanded is None else self.expanded[rows]
        )

    @classmethod
    def joined(cls, pieces: Sequence[TokenRows]) -> TokenRows:
        if len(pieces) == 1:
            return pieces[0]
        rows = max(len(piece.flat) for piece in pieces)
        flat = np.concatenate([_attended(piece.flat, rows) for piece in pieces], axis=1)
        lengths = np.concatenate([piece.lengths for piece in pieces])
        if all(piece.expanded is None for piece in pieces):
            return cls(flat, offsets_of(lengths))
        marks = [np.zeros(len(piece), bool) if piece.expanded is None else piece.expanded for piece in pieces]
        return cls(flat, offsets_of(lengths), np.concatenate(marks))


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The tokens of a block."""

    rows: TokenRows
    errors: Mapping[int, Exception]
    """By row: why it has none."""
    truncated: int
    """How many were cut."""

    def merged(self, other: TokenColumn, rows: RowNumbers) -> TokenColumn:
        """This and another column; `rows` are the places of the texts of both, each once."""
        errors = {int(rows[row]): error for row, error in self.errors.items()}
        errors |= {int(rows[len(self.rows) + row]): error for row, error in other.errors.items()}
        joined = TokenRows.joined([self.rows, other.rows]).take(np.argsort(rows))
        return TokenColumn(joined, errors, self.truncated + other.truncated)

    def prepared(self) -> PreparedColumn:
        """For a job. A text costs its tokens; one with an error, nothing."""
        costs = self.rows.lengths
        costs[list(self.errors)] = 0
        return PreparedColumn(self.rows, costs, self.errors, self.truncated)


def offsets_of(lengths: Sequence[int] | NDArray[np.integer | np.bool_]) -> NDArray[np.int64]:
    """Where texts of these lengths begin, one after the other, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _attended(tokens: Tokens, rows: int) -> Tokens:
    """Tokens with that number of rows, the last of which says that each is attended to, unless they have it already."""
    return tokens if len(tokens) == rows else np.concatenate([tokens, np.ones_like(tokens[:1])])
