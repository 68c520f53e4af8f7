"""How texts of different lengths share a batch, so that no output depends on its company."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from headrace.engines.network import Network, Rows
from headrace.engines.text.tokenizing import TextTokens, Tokens
from headrace.errors import EngineDeadError, EngineError, EngineOutOfMemoryError

Padding: TypeAlias = Literal["right", "left", "equal lengths", "one at a time"]
"""Where padding stands; or no padding, because a batch holds texts of one length, or one text."""

logger = logging.getLogger("headrace")

_SLOWER = {
    "equal lengths": "this model's output for a text depends on the padding beside it; "
    "texts run only with texts of the same length, which is slower",
    "one at a time": "this model's output for a text depends on the other texts of its batch; "
    "texts run one at a time, which is slower",
}


class TextRows:
    """Runs texts through a network, each as it would be alone.

    How is settled when it is made: a few texts of different lengths are run one at a time and then together, and the
    first padding that changes nothing is kept. The right side is tried first, then the left.

    Args:
        network: gives one row per text.
        tokens: makes arrays of texts.

    Raises:
        EngineError: the network cannot run a text at all.
    """

    def __init__(self, network: Network, tokens: TextTokens) -> None:
        self._network = network
        self._tokens = tokens
        self.padding = self._settle()
        if self.padding in _SLOWER:
            logger.warning(_SLOWER[self.padding])

    def __call__(self, batch: Sequence[Tokens]) -> Rows:
        """One row per text, in order.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device.
            EngineDeadError: the device failed, or the network is closed.
        """
        return self._run(batch, self.padding)

    def describe(self) -> dict[str, object]:
        """What of it decides an output."""
        return {} if self.padding == "right" else {"padding": self.padding}

    def _run(self, batch: Sequence[Tokens], padding: Padding) -> Rows:
        if padding == "right" or padding == "left":
            return self._network.run(self._tokens.collate(batch, self._network.inputs, padding))
        groups: dict[int, list[int]] = {}
        for place, tokens in enumerate(batch):
            groups.setdefault(place if padding == "one at a time" else tokens.shape[1], []).append(place)
        rows = np.concatenate([self._run([batch[place] for place in group], "right") for group in groups.values()])
        return rows[np.argsort([place for group in groups.values() for place in group])]

    def _settle(self) -> Padding:
        samples = self._tokens.samples()
        samples += samples[1:]  # two of one length
        try:
            alone = self._run(samples, "one at a time")
        except (EngineDeadError, EngineOutOfMemoryError):
            raise
        except Exception as error:  # whatever a model's own code, or an ONNX runtime, raises
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
        except Exception:  # noqa: BLE001 - some models refuse a padded batch, each in its own way
            return False
        room = self._network.tolerance * float(np.abs(alone).max())
        return together.shape == alone.shape and float(np.abs(together - alone).max()) <= room  # never with NaN


_TRIED: tuple[Padding, ...] = ("right", "left", "equal lengths")
