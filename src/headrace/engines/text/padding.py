"""Batch texts of different lengths so that no output depends on what else is in its batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from headrace.engines.networks.base import Network, Rows
from headrace.engines.text.tokenizing import TextTokens, Tokens, longest_of
from headrace.errors import EngineDeadError, EngineError, EngineOutOfMemoryError

Padding: TypeAlias = Literal["right", "left", "equal lengths", "one at a time"]
"""The padding side; or no padding, because a batch holds texts of one length, or one text."""

logger = logging.getLogger("headrace")

_SLOWER = {
    "equal lengths": "this model's output for a text depends on the padding beside it; "
    "texts run only with texts of the same length, which is slower",
    "one at a time": "this model's output for a text depends on the other texts of its batch; "
    "texts run one at a time, which is slower",
}


class TextRows:
    """Runs texts through a network with the same outputs as one text at a time.

    The constructor chooses the padding: it runs test texts of different lengths one at a time and then together, and
    keeps the first padding that does not change the outputs. The right side is tried first, then the left.

    Args:
        network: returns one row per text, or per token.
        tokens: converts texts to arrays.
        per_token: whether the network returns one row per token of each text.

    Raises:
        EngineError: the network cannot run a text at all.
    """

    def __init__(self, network: Network, tokens: TextTokens, *, per_token: bool = False) -> None:
        self._network = network
        self._per_token = per_token
        self._tokens = tokens
        self.padding = self._choose_padding()
        if self.padding in _SLOWER:
            logger.warning(_SLOWER[self.padding])

    def __call__(self, batch: Sequence[Tokens]) -> Rows:
        """One row per text, or per token, in order.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device.
            EngineDeadError: the device failed, or the network is closed.
        """
        if self.padding == "right" or self.padding == "left":
            longest = longest_of(batch)
            length = min(self._network.length_for(len(batch), longest), self._tokens.max_model_len)
            return self._padded(batch, self.padding, max(length, longest))
        return self._run(batch, self.padding)

    def describe(self) -> dict[str, object]:
        """The settings that affect an output."""
        return {} if self.padding == "right" else {"padding": self.padding}

    def _run(self, batch: Sequence[Tokens], padding: Padding) -> Rows:
        if padding == "right" or padding == "left":
            return self._padded(batch, padding, longest_of(batch))
        groups: dict[int, list[int]] = {}
        for place, tokens in enumerate(batch):
            groups.setdefault(place if padding == "one at a time" else tokens.shape[1], []).append(place)
        rows = np.concatenate([self._run([batch[place] for place in group], "right") for group in groups.values()])
        places = [place for group in groups.values() for place in group]
        counts = [batch[place].shape[1] if self._per_token else 1 for place in places]
        return rows[np.argsort(np.repeat(places, counts), kind="stable")]

    def _padded(self, batch: Sequence[Tokens], side: Literal["right", "left"], length: int) -> Rows:
        return self._network.run(self._tokens.collate(batch, self._network.inputs, side, length))

    def _choose_padding(self) -> Padding:
        samples = self._tokens.samples()
        samples += samples[1:]  # two of one length
        try:
            alone = self._run(samples, "one at a time")
        except (EngineDeadError, EngineOutOfMemoryError):
            raise
        except Exception as error:  # a model's code or an ONNX runtime may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EngineError(f"the model fails on a text of {samples[0].shape[1]} tokens: {reason}") from error
        for padding in _TRIED[2 if self._network.by_length else 0 :]:
            if self._agrees(samples, alone, padding):
                return padding
        return "one at a time"

    def _agrees(self, samples: list[Tokens], alone: Rows, padding: Padding) -> bool:
        try:
            together = self._run(samples, padding)
        except (EngineDeadError, EngineOutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001 - models that refuse a padded batch raise various errors
            return False
        room = self._network.tolerance * float(np.abs(alone).max())
        return together.shape == alone.shape and float(np.abs(together - alone).max()) <= room  # never with NaN


_TRIED: tuple[Padding, ...] = ("right", "left", "equal lengths")
