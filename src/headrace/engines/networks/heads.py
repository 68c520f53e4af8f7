"""Convert network outputs to results: labels with scores, the score of a pair, or a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

import numpy as np

from headrace.device.pipeline import OutputRows
from headrace.engines.model_config import ModelConfig
from headrace.engines.networks.quantizing import QuantizedVector, quantized
from headrace.engines.options import ChunkJoin, OutputDtype
from headrace.errors import ConfigError, EngineError, RecordError

Head: TypeAlias = Callable[[OutputRows], Sequence[object]]
"""Makes one result for each output row of a network."""


@runtime_checkable
class JoiningHead(Protocol):
    """A head that can make one result of several rows."""

    joins: ClassVar[tuple[ChunkJoin, ...]]
    """The ways that it has; the first is the default."""

    def __call__(self, rows: OutputRows) -> Sequence[object]: ...

    def join(self, rows: OutputRows, weights: Sequence[int], how: ChunkJoin) -> object:
        """One result for the rows of one text's chunks."""
        ...


@dataclass(frozen=True, slots=True)
class RowJoin:
    """Joins the rows of a text's chunks."""

    head: JoiningHead
    how: ChunkJoin

    def __call__(self, outputs: Sequence[OutputRows], weights: Sequence[int]) -> object:
        return self.head.join(np.stack(outputs), weights, self.how)


def _joined(scores: OutputRows, weights: Sequence[int], how: ChunkJoin) -> OutputRows:
    if how == "max":
        return np.asarray(scores.max(axis=0), dtype=np.float32)
    return np.average(scores, axis=0, weights=weights).astype(np.float32)


Function: TypeAlias = Literal["softmax", "sigmoid", "none"]


_UNIT = 1e-3
"""How far from 1 the length of a normalised vector may be, by rounding."""


class BestLabels(TypedDict):
    """The most likely label, and the next ones if requested."""

    label: str
    score: float
    """Between 0 and 1, except for a regression."""
    labels: NotRequired[list[str]]
    """The `top_labels` most likely, best first."""
    scores: NotRequired[list[float]]


class LabelHead:
    """Label scores from logits.

    Args:
        names: the label of each column.
        function: converts logits to scores; softmax for mutually exclusive labels, sigmoid for independent ones.
        top: how many labels to list; None for only the best.
    """

    joins: ClassVar[tuple[ChunkJoin, ...]] = ("mean", "max")

    def __init__(self, names: Sequence[str], function: Function, top: int | None = None) -> None:
        if top is not None and not 1 <= top <= len(names):
            raise ConfigError(
                f"``top_labels`` is {top}; it must be between 1 and {len(names)}, the model's number of labels"
            )
        self._names = names
        self._function = function
        self._top = top

    def __call__(self, logits: OutputRows) -> list[BestLabels]:
        return self._ranked(apply(self._function, logits))

    def join(self, rows: OutputRows, weights: Sequence[int], how: ChunkJoin) -> BestLabels:
        """The mean of the scores of each label, or the largest."""
        return self._ranked(_joined(apply(self._function, rows), weights, how)[None])[0]

    def _ranked(self, scores: OutputRows) -> list[BestLabels]:
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self._top or 1]
        ranked = np.take_along_axis(scores, order, axis=1).tolist()
        labels = [[self._names[index] for index in row] for row in order.tolist()]
        if not self._top:
            return [BestLabels(label=names[0], score=own[0]) for names, own in zip(labels, ranked, strict=True)]
        return [
            BestLabels(label=names[0], score=own[0], labels=names, scores=own)
            for names, own in zip(labels, ranked, strict=True)
        ]


class ScoreHead:
    """One number per row."""

    joins: ClassVar[tuple[ChunkJoin, ...]] = ("max", "mean")

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, logits: OutputRows) -> list[float]:
        scores: list[float] = apply(self._function, logits)[:, 0].tolist()
        return scores

    def join(self, rows: OutputRows, weights: Sequence[int], how: ChunkJoin) -> float:
        """The largest score, as of the best passage of a document, or the mean."""
        return float(_joined(apply(self._function, rows)[:, 0], weights, how))


class VectorHead:
    """The rows as vectors: truncated to `dimension` components if set, scaled to length 1 if asked for, quantized."""

    joins: ClassVar[tuple[ChunkJoin, ...]] = ("mean",)

    def __init__(
        self, dimension: int | None, *, normalize: bool = False, output_dtype: OutputDtype = "float32"
    ) -> None:
        self._dimension = dimension
        self._normalize = normalize
        self._output_dtype = output_dtype

    def __call__(self, rows: OutputRows) -> Sequence[QuantizedVector | RecordError]:
        rows = rows[:, : self._dimension]
        if self._normalize:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return quantized(rows, self._output_dtype)

    def join(self, rows: OutputRows, weights: Sequence[int], how: ChunkJoin) -> QuantizedVector | RecordError:
        """The mean, weighted by tokens; of length 1 if the model scales its vectors to that length."""
        mean = _joined(rows, weights, how)[None]
        if np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=_UNIT):
            mean /= max(float(np.linalg.norm(mean)), 1e-12)
        return self(mean)[0]


def matryoshka_dimensions(config: ModelConfig, dimension: int) -> Sequence[int]:
    """The smaller dimensions that a Matryoshka model supports, from its config.json.

    The fields are those that vLLM reads: `"matryoshka_dimensions": [64, 128]`, or `"is_matryoshka": true` for any.
    """
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(sorted(int(length) for length in listed if 0 < int(length) < dimension))
    return range(1, dimension) if config.get("is_matryoshka") is True else ()


def apply(function: Function, logits: OutputRows) -> OutputRows:
    """Scores from logits along the last axis, float32; numerically stable for large logits."""
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
        ConfigError: the labels are missing or incomplete.
    """
    names = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    if sorted(names) != list(range(len(names))) or not names:
        raise ConfigError(f"the model's config.json has no usable id2label ({names}); it must name 0 to N-1")
    return [names[index] for index in range(len(names))]


def check_columns(width: int | None, names: Sequence[str]) -> None:
    """Check that a network gives one output for each label; None for an unknown number.

    Raises:
        EngineError: it gives more or fewer.
    """
    if width not in (None, len(names)):
        raise EngineError(
            f"the model gives {width} outputs, and its config.json names {len(names)} labels ({', '.join(names):.80}): "
            "its files do not belong together"
        )


def label_function(config: ModelConfig, labels: int) -> Function:
    """The activation for a classifier's logits, from its config.json."""
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or labels == 1 else "softmax"
