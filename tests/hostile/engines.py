"""Engines of the hostile corpus: outputs that depend on the text alone, and are the same by rows and by columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.errors import RecordError

try:
    from headrace.columns import PayloadList, PreparedColumn

    BY_COLUMNS = {"prepares_columns": True}
except ImportError:  # a revision without them
    BY_COLUMNS = {}


class Lists:
    """Answers of many kinds, one for each text, by its letters."""

    profile = EngineProfile(batching="batches", batch_cost=4096, batch_size=64)
    _answers = (1, -0.0, "text\0of", None, [1.5], {"a": [1, "b"], "ä": None}, True, 2**53 + 1, [[1], []], float("nan"))

    def __init__(self, model: str | None = None) -> None:
        del model

    def describe(self) -> Mapping[str, object]:
        """Nothing decides the output."""
        return {"engine": type(self).__name__}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[str] | Exception]:
        """The texts, or a refusal."""
        return [
            Prepared(text, len(text) + 1) if isinstance(text, str) else RecordError(f"{type(text).__name__} is no text")
            for text in inputs
        ]

    def forward(self, batch: Sequence[str]) -> Sequence[Any]:
        """One answer for each; fails for a text with poison."""
        for text in batch:
            if "poison" in text:
                raise RuntimeError(f"the model cannot take {text[:30]!r}")
        return [self._answers[sum(text.encode(errors="replace")) % len(self._answers)] for text in batch]

    def close(self) -> None:
        """Nothing to free."""


class Columns(Lists):
    """A vector of two numbers for each text; it prepares columns where Headrace knows of them."""

    profile = EngineProfile(batching="batches", batch_cost=4096, batch_size=64, **BY_COLUMNS)  # type: ignore[arg-type]

    def prepare_column(self, inputs: Any) -> Any:
        """As `prepare`."""
        values = inputs.to_pylist() if hasattr(inputs, "to_pylist") else inputs
        prepared = self.prepare(values)
        errors = {row: one for row, one in enumerate(prepared) if isinstance(one, Exception)}
        costs = np.array([1 if isinstance(one, Exception) else one.cost for one in prepared], np.int64)
        texts = ["" if isinstance(one, Exception) else one.payload for one in prepared]
        return PreparedColumn(PayloadList(texts, sum(map(len, texts))), costs, errors)

    def forward(self, batch: Sequence[str]) -> Any:
        """One row for each; NaN where the text says so; fails for a text with poison."""
        super().forward(batch)
        rows = [
            (len(text), float("nan") if "nan" in text else sum(text.encode(errors="replace")) / 8) for text in batch
        ]
        return np.array(rows, np.float32).reshape(len(batch), 2)
