"""Text tasks for any network: labels of texts, scores of pairs, and labels of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headrace.batching.policy.cost import BatchCost, BatchLimits
from headrace.device.pipeline import OutputRows
from headrace.engines.base import Chunks, Prepared
from headrace.engines.model_config import ModelConfig
from headrace.engines.networks.base import Network, NetworkEngine
from headrace.engines.networks.heads import (
    BestLabels,
    Function,
    Head,
    LabelHead,
    ScoreHead,
    apply,
    check_columns,
    label_function,
    label_names,
)
from headrace.engines.options import CandidateOptions
from headrace.engines.text.engine import TextEngine, TextRows, text_profile
from headrace.engines.text.token_rows import TokenRows, Tokens
from headrace.engines.text.tokenizing import TextTokens
from headrace.errors import ConfigError

# Activation names in cross-encoders' configurations; the default is the sigmoid.
_ACTIVATIONS: Mapping[str, Function] = {"Identity": "none", "Sigmoid": "sigmoid"}


class ZeroShotEngine(NetworkEngine):
    """Classifies texts by the user's labels with a natural language inference model.

    Each text makes one row per label: does the text entail "This example is about LABEL."? A text costs the sum of
    its rows, padded to the longest.

    Args:
        network: returns logits with a column for entailment and one for contradiction.
        tokens: created with `takes="premise"`.
    """

    def __init__(self, network: Network, tokens: TextTokens, candidates: Candidates, config: ModelConfig) -> None:
        self.network = network
        self.tokens = tokens
        self._rows = TextRows(network, tokens)
        check_columns(self._rows.width, label_names(config))
        self._candidates = candidates
        self._entailment, self._contradiction = _entailment_columns(config)
        self._head = LabelHead(candidates.labels, "none", len(candidates.labels))
        candidates.check_length(tokens)
        self._row_tokens = max(network.batch_tokens, tokens.max_model_len)
        # The longest text with all its labels fits in the budget.
        budget = max(self._row_tokens, len(candidates.labels) * tokens.max_model_len)
        self.profile = text_profile(network, tokens, budget)

    def describe(self) -> Mapping[str, object]:
        return {
            "engine": "zero-shot",
            **self.network.describe(),
            **self._rows.describe(),
            "max_model_len": self.tokens.max_model_len,
            **self.tokens.long_texts.describe(),
            "labels": list(self._candidates.labels),
            "template": self._candidates.template,
            "multi_label": self._candidates.multi_label,
        }

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[list[Tokens]] | Exception]:
        """Tokens of each text with each label; a RecordError if the input is not text."""
        return [self._prepare(value) for value in inputs]

    def _prepare(self, value: object) -> Prepared[list[Tokens]] | Exception:
        rows: list[Tokens] = []
        truncated = False
        for pair in self.tokens.prepare([(value, hypothesis) for hypothesis in self._candidates.hypotheses]):
            if isinstance(pair, Exception):
                return pair
            assert not isinstance(pair.payload, Chunks), "no join was given"
            rows.append(pair.payload)
            truncated = truncated or pair.truncated
        return Prepared(rows, cost=len(rows) * max(row.shape[1] for row in rows), truncated=truncated)

    def forward(self, batch: list[list[Tokens]]) -> list[BestLabels]:
        """All labels of each text, most likely first."""
        if not batch:
            return []
        rows = self.tokens.rows_of([row for text in batch for row in text])
        logits = np.concatenate([self._rows(some) for some in _within(rows, self._row_tokens)])
        return self._head(self._scores(logits.reshape(len(batch), len(self._candidates.labels), -1)))

    def _scores(self, logits: OutputRows) -> OutputRows:
        """One score per text and label, from logits of shape (texts, labels, columns)."""
        entailed = logits[..., self._entailment]
        if self._candidates.multi_label or len(self._candidates.labels) == 1:
            return apply("sigmoid", entailed - logits[..., self._contradiction])
        return apply("softmax", entailed)


class Candidates:
    """The candidate labels of a zero-shot classifier.

    Raises:
        ConfigError: no label, a duplicate label, or a template without `{}`.
    """

    def __init__(self, options: CandidateOptions) -> None:
        labels, template = options.labels, options.hypothesis_template
        if isinstance(labels, str):
            labels = [label.strip() for label in labels.split(",")]
        if not labels or len(set(labels)) != len(labels) or not all(labels):
            raise ConfigError(f"``labels`` is {labels!r}; it must be a list of unique, non-empty strings")
        if "{}" not in template:
            raise ConfigError(f"``hypothesis_template`` is {template!r}; it must contain {{}} for the label")
        self.labels = list(labels)
        self.template = template
        self.multi_label = options.multi_label
        self.hypotheses = [template.replace("{}", label) for label in labels]

    def check_length(self, tokens: TextTokens) -> None:
        """Check that every hypothesis leaves room for a text. Raises ConfigError: a label is too long."""
        for label, hypothesis in zip(self.labels, self.hypotheses, strict=True):
            if tokens.pair_length(hypothesis) >= tokens.max_model_len:
                raise ConfigError(
                    f"the label {label!r} leaves no room for a text in the model's {tokens.max_model_len} tokens"
                )


def classifier(network: Network, tokens: TextTokens, config: ModelConfig, top_labels: int | None = None) -> TextEngine:
    engine = TextEngine(network, tokens, *label_head(config, top_labels))
    check_columns(engine.width, label_names(config))
    return engine


def scorer(network: Network, tokens: TextTokens, config: ModelConfig) -> TextEngine:
    """Create a cross-encoder: one score per pair. Raises ConfigError: as `score_head`."""
    engine = TextEngine(network, tokens, *score_head(config))
    check_columns(engine.width, label_names(config))
    return engine


def label_head(config: ModelConfig, top_labels: int | None) -> tuple[Head, dict[str, object]]:
    """The head of a classifier, by its config.json, and the facts that determine its output."""
    names = label_names(config)
    function = label_function(config, len(names))
    facts: dict[str, object] = {
        "engine": "classification",
        "labels": names,
        "scores": function,
        "top_labels": top_labels,
    }
    return LabelHead(names, function, top_labels), facts


def score_head(config: ModelConfig) -> tuple[Head, dict[str, object]]:
    """The head of a cross-encoder, by its config.json, and the facts that determine its output.

    Raises:
        ConfigError: the model has more than one output, or an unknown activation.
    """
    outputs = len(config.get("id2label") or {}) or 2
    if outputs != 1:
        raise ConfigError(f"the model gives {outputs} outputs per pair, not one score; use the task classify")
    own = config.get("sentence_transformers") or {}
    name = str(own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    function = _ACTIVATIONS.get(name.rpartition(".")[2])
    if function is None:
        raise ConfigError(f"the model's activation {name} is unknown; known: {', '.join(_ACTIVATIONS)}")
    return ScoreHead(function), {"engine": "score", "scores": function}


def _entailment_columns(config: ModelConfig) -> tuple[int, int]:
    names = [name.lower() for name in label_names(config)]
    entailed = [index for index, name in enumerate(names) if name.startswith("entail")]
    if not entailed or len(names) < 2:
        raise ConfigError(
            f"zero-shot needs a natural language inference model with a label 'entailment'; this model's are {names}"
        )
    contradicted = [index for index, name in enumerate(names) if name.startswith(("contra", "not"))]
    return entailed[0], contradicted[0] if contradicted else len(names) - 1 if entailed[0] == 0 else 0


def _within(rows: TokenRows, budget: int) -> Iterator[TokenRows]:
    """Split the rows, in order, into batches with a padded cost within the budget; a longer row is a batch of one."""
    limits = BatchLimits(budget, len(rows), padded=True)
    lengths = rows.lengths.tolist()
    start = 0
    while start < len(rows):
        end = start + BatchCost(limits).fill(lengths[start:])
        yield rows.take(np.arange(start, end))
        start = end
