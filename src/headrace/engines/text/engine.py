"""The engine of texts: one output per text, which does not depend on what else is in its batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.columns import Column, PreparedColumn, RowNumbers
from headrace.device.pipeline import Arrays, OutputRows
from headrace.engines.base import Part
from headrace.engines.capabilities import ColumnPreparer
from headrace.engines.networks.base import Network, NetworkEngine
from headrace.engines.networks.heads import Head, JoiningHead, RowJoin
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.vocabulary import TokenizedEngine
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.token_rows import TokenRows, Tokens
from headrace.engines.text.tokenizing import TextTokens
from headrace.errors import ConfigError, EngineError, ModelCodeError, model_code

PaddingSide: TypeAlias = Literal["right", "left"]
TextPadding: TypeAlias = Literal["packed", "right", "left", "equal lengths", "one at a time"]
"""The padding side; or no padding, because the texts are one row, or because a batch holds texts of one length, or one
text."""

logger = logging.getLogger("headrace")

_SLOWER = {
    "equal lengths": "this model's output for a text depends on the padding beside it; "
    "texts run only with texts of the same length, which is slower",
    "one at a time": "this model's output for a text depends on the other texts of its batch; "
    "texts run one at a time, which is slower",
}

_TRIED: tuple[TextPadding, ...] = ("packed", "right", "left", "equal lengths")


class TextEngine(TokenizedEngine, NetworkEngine):
    """One output per text, or per pair of texts.

    Args:
        network: returns one row per text, or per token.
        facts: further facts that determine the output, such as the engine's name and parameters.
        per_token: whether the network returns one row per token; a subclass then makes the outputs.
    """

    tokens: TextTokens

    def __init__(
        self,
        network: Network,
        tokens: TextTokens,
        head: Head,
        facts: Mapping[str, object],
        *,
        per_token: bool = False,
    ) -> None:
        self._join = _row_join(head, tokens.long_texts)
        if self._join is not None:
            tokens.split_with(self._join)
        self.network = network
        self.tokens = tokens
        self.preparer: ColumnPreparer | None = None if tokens.long_texts.splits else tokens
        """Prepares columns without the network."""
        self._rows = TextRows(network, tokens, per_token=per_token)
        self.width = self._rows.width
        """How many numbers the network gives for each text, or token."""
        self._head = head
        self._facts = facts
        budget = max(network.batch_tokens, tokens.max_model_len)
        splits = tokens.long_texts.splits
        self.profile = replace(
            text_profile(network, tokens, budget), tokenizes=True, splits=splits, prepares_columns=not splits
        )

    def describe(self) -> Mapping[str, object]:
        return {
            **self._facts,
            **self.network.describe(),
            **self._rows.describe(),
            "max_model_len": self.tokens.max_model_len,
            **self.tokens.long_texts.describe(),
            **({} if self._join is None else {"chunk_join": self._join.how}),
        }

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        return self.tokens.prepare_column(inputs)

    def forward(self, batch: TokenRows | list[Tokens | Part[Tokens]]) -> Sequence[object]:
        """One output per text; for a part of a long text, its row."""
        if not len(batch):
            return []
        if isinstance(batch, TokenRows):
            return self._outputs(batch, self._rows(batch))
        texts = self.tokens.rows_of([item.payload if isinstance(item, Part) else item for item in batch])
        rows = self._rows(texts)
        outputs = self._outputs(texts, rows)
        if not any(isinstance(item, Part) for item in batch):
            return outputs
        return [
            row.copy() if isinstance(item, Part) else output
            for item, row, output in zip(batch, rows, outputs, strict=True)
        ]

    def _outputs(self, batch: TokenRows, rows: OutputRows) -> Sequence[object]:  # noqa: ARG002 - for subclasses
        return self._head(rows)


class TextRows:
    """Runs texts through a network with the same outputs as one text at a time.

    The constructor chooses the padding: it runs test texts of different lengths one at a time and then together, and
    keeps the first padding that does not change the outputs. No padding is tried first, then the right side, then the
    left.

    Args:
        per_token: whether the network returns one row per token of each text.

    Raises:
        EngineError: the network cannot run a text at all.
    """

    def __init__(self, network: Network, tokens: TextTokens, *, per_token: bool = False) -> None:
        self._network = network
        self._per_token = per_token
        self._tokens = tokens
        self.width = 0
        """How many components a row has. A model's files may say something else."""
        self.reason = network.no_packing or "its outputs would be others"
        """Why texts are padded, if they are."""
        self.padding = self._choose_padding()
        if self.padding in _SLOWER:
            logger.warning(_SLOWER[self.padding])
        elif self.padding != "packed":
            level = logging.WARNING if network.kind == "cuda" else logging.DEBUG
            logger.log(
                level, "texts are padded, which is slower: the model cannot run them in a row, since %s", self.reason
            )

    def __call__(self, batch: TokenRows) -> OutputRows:
        """One row per text, or per token, in order. Errors as `Network.run`."""
        # Tokens that nothing attends to are marked by a mask.
        hidden = self.padding == "packed" and batch.expanded is not None and bool(batch.expanded.any())
        return self._run(batch, "right" if hidden else self.padding)

    def describe(self) -> dict[str, object]:
        return {} if self.padding in ("packed", "right") else {"padding": self.padding}

    def _run(self, batch: TokenRows, padding: TextPadding) -> OutputRows:
        if padding == "right" or padding == "left":
            return self._network.run_texts(self._of(batch, padding), packed=False)
        lengths = batch.lengths
        if padding == "packed":
            steps = np.diff(lengths)
            if not (steps.min(initial=0) < 0 < steps.max(initial=0)):  # equal lengths are neighbours
                return self._network.run_texts(self._of(batch), packed=True)
            groups = [np.argsort(-lengths, kind="stable")]
        elif padding == "one at a time":
            groups = [np.array([place]) for place in range(len(batch))]
        else:
            groups = [np.flatnonzero(lengths == length) for length in dict.fromkeys(lengths.tolist())]
        inner: TextPadding = "packed" if padding == "packed" else "right"
        rows = np.concatenate([self._run(batch.take(group), inner) for group in groups])
        places = np.concatenate(groups)
        counts = lengths[places] if self._per_token else 1
        return rows[np.argsort(np.repeat(places, counts), kind="stable")]

    def _of(self, batch: TokenRows, side: PaddingSide = "right") -> TokenBatch:
        return TokenBatch(batch, self._tokens, self._network.inputs, side)

    def _choose_padding(self) -> TextPadding:
        samples = self._tokens.samples()
        samples += samples[1:]  # two of one length
        batch = self._tokens.rows_of(samples)
        try:
            with model_code():
                alone = self._run(batch, "one at a time")
        except ModelCodeError as error:
            raise EngineError(f"the model fails on a text of {batch.lengths[0]} tokens: {error}") from error
        if alone.ndim != 2:
            shape = " × ".join(map(str, alone.shape[1:]))
            raise EngineError(f"the model gives {shape} numbers for a text, not a row of them: it has another task")
        self.width = alone.shape[1]
        tried = _TRIED[3:] if self._network.by_length else _TRIED[1:] if self._network.no_packing else _TRIED
        for padding in tried:
            if self._agrees(batch, alone, padding):
                return padding
        return "one at a time"

    def _agrees(self, samples: TokenRows, alone: OutputRows, padding: TextPadding) -> bool:
        try:
            with model_code():
                together = self._run(samples, padding)
        except ModelCodeError as error:  # it refuses such a batch
            if padding == "packed":
                self.reason = str(error)
            return False
        room = self._network.tolerance * float(np.abs(alone).max())
        return together.shape == alone.shape and float(np.abs(together - alone).max()) <= room  # never with NaN


@dataclass(frozen=True, slots=True)
class TokenBatch:
    rows: TokenRows
    tokens: TextTokens
    inputs: frozenset[str]
    """Names of the network's input arrays."""
    side: PaddingSide
    """Where they are padded."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.rows.lengths

    def take(self, rows: RowNumbers) -> TokenBatch:
        return replace(self, rows=self.rows.take(rows))

    def padded(self, length: int | None = None) -> Arrays:
        """Arrays of shape (texts, length), or less where the model takes no longer texts."""
        longest = self.rows.longest
        length = max(longest, min(length or longest, self.tokens.max_model_len))
        return self.tokens.collate(self.rows, self.inputs, self.side, length)

    def packed(self, length: int) -> Arrays:
        return self.tokens.packed(self.rows, self.inputs, length)


def _row_join(head: Head, long_texts: LongTexts) -> RowJoin | None:
    """What joins the rows of a text's chunks; None if no text is split."""
    if not long_texts.splits:
        return None
    assert isinstance(head, JoiningHead), "only such an engine says that it splits"
    how = long_texts.chunk_join or head.joins[0]
    if how not in head.joins:
        known = " or ".join(map(repr, head.joins))
        raise ConfigError(f"``chunk_join`` is {how!r}; this task joins the outputs for the chunks of a text by {known}")
    return RowJoin(head, how)


def text_profile(network: Network, tokens: TextTokens, budget: int) -> EngineProfile:
    """The profile of an engine of texts, whose batches cost at most `budget` tokens."""
    return EngineProfile(
        tunable=True,
        batching="batches",
        pads=True,
        overlaps=network.overlaps,
        batch_cost=budget,
        batch_size=budget,
        max_model_len=tokens.max_model_len,
    )
