"""What a network's numbers mean: labels with scores, a score of a pair, a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace.engines.model_folder import ModelConfig
from headrace.engines.network import Rows
from headrace.errors import ConfigError

Head: TypeAlias = Callable[[Rows], Sequence[object]]
"""One output for each row of a network's."""

Function: TypeAlias = Literal["softmax", "sigmoid", "none"]


class Classification(TypedDict):
    """The likeliest label, and where asked for the next ones."""

    label: str
    score: float
    """Between 0 and 1, except for a regression."""
    labels: NotRequired[list[str]]
    """The `top_labels` likeliest, likeliest first."""
    scores: NotRequired[list[float]]


class LabelHead:
    """Scores of labels from logits.

    Args:
        names: the label of each column.
        function: what makes scores of logits; softmax lets labels exclude each other, sigmoid does not.
        top: how many labels to list; None lists none beside the best.
    """

    def __init__(self, names: Sequence[str], function: Function, top: int | None = None) -> None:
        if top is not None and not 1 <= top <= len(names):
            raise ConfigError(f"top_labels is {top}; it may be 1 to {len(names)}, the labels there are")
        self._names = names
        self._function = function
        self._top = top

    def __call__(self, logits: Rows) -> list[Classification]:
        """One classification per row."""
        return [self._ranked(row) for row in apply(self._function, logits)]

    def _ranked(self, scores: Rows) -> Classification:
        order = np.argsort(-scores, kind="stable")[: self._top or 1]
        result = Classification(label=self._names[order[0]], score=float(scores[order[0]]))
        if self._top:
            result["labels"] = [self._names[index] for index in order]
            result["scores"] = [float(scores[index]) for index in order]
        return result


class ScoreHead:
    """One number per row."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, logits: Rows) -> list[float]:
        """The first column."""
        return [float(score) for score in apply(self._function, logits)[:, 0]]


class VectorHead:
    """The rows themselves, cut to their first components where a number is given."""

    def __init__(self, dimension: int | None) -> None:
        self._dimension = dimension

    def __call__(self, rows: Rows) -> list[NDArray[np.float32]]:
        """One vector per row."""
        return list(rows[:, : self._dimension])


def matryoshka_dimensions(config: ModelConfig, dimension: int) -> Sequence[int]:
    """The lengths below its own that a model's vectors were trained to be cut to, from its config.json.

    It says so as vLLM reads it: `"matryoshka_dimensions": [64, 128]`, or `"is_matryoshka": true` for any length.
    """
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(sorted(int(length) for length in listed if 0 < int(length) < dimension))
    return range(1, dimension) if config.get("is_matryoshka") is True else ()


def apply(function: Function, logits: Rows) -> Rows:
    """Scores from logits, over the last axis, in float32; large logits do not overflow."""
    if function == "none":
        return logits
    if function == "sigmoid":
        positive = 1 / (1 + np.exp(-np.abs(logits)))
        return np.where(logits >= 0, positive, 1 - positive).astype(np.float32)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float32)


def label_names(config: ModelConfig) -> list[str]:
    """The label of each output column, from a model's config.json.

    Raises:
        ConfigError: it names none, or not every column.
    """
    names = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    if sorted(names) != list(range(len(names))) or not names:
        raise ConfigError(f"the model's config.json has no usable id2label ({names}); it must name 0 to N-1")
    return [names[index] for index in range(len(names))]


def label_function(config: ModelConfig, labels: int) -> Function:
    """What makes scores of a classifier's logits, by its config.json."""
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or labels == 1 else "softmax"
