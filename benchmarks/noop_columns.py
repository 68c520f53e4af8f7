"""The engine that does nothing, for blocks: it takes columns and answers with one array for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.noop import Noop
from headrace.columns import Column, PreparedColumn
from headrace.engines.profile import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy
    from numpy.typing import NDArray


class Rows:
    """Payloads that are only counted."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.nbytes = 8 * count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> str:
        return ""

    def take(self, rows: NDArray[numpy.intp]) -> Rows:
        """As many."""
        return Rows(len(rows))

    @classmethod
    def joined(cls, pieces: Sequence[Rows]) -> Rows:
        """All of them."""
        return cls(sum(map(len, pieces)))


class NoopColumns(Noop):
    """An engine that does nothing to a block."""

    profile = EngineProfile(batching="batches", batch_cost=1_000_000, batch_size=4096, prepares_columns=True)

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Nothing to keep of the texts, each of cost 1."""
        import numpy as np

        return PreparedColumn(Rows(len(inputs)), np.ones(len(inputs), np.int64))

    def forward(self, batch: Rows | list[str]) -> NDArray[numpy.float32]:  # type: ignore[override]
        """A vector of two numbers for each."""
        import numpy as np

        return np.tile(np.array([0.5, 0.25], np.float32), (len(batch), 1))
