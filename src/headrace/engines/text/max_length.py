"""How many tokens a text may have: the limits in a model's files, and the user's."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engines.model_config import ModelConfig
from headrace.errors import ConfigError

# Tokenizers without a limit have a huge number instead.
_NO_LIMIT = 1 << 24

_COUNT_FROM_PADDING = frozenset(
    [
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mluke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
"""Model types whose positions start after the id of the padding token."""


def usable_positions(config: ModelConfig) -> int | None:
    """The maximum number of tokens by the network's positions, from its config.json; None if unlimited."""
    config = config.get("text_config") or config
    positions: int | None = config.get("max_position_embeddings")
    if positions is None and "relative_attention_num_buckets" not in config:
        positions = config.get("n_positions")
    if positions and config.get("model_type") in _COUNT_FROM_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
    return positions


def choose_length(limits: Sequence[int | None], positions: int | None, smallest: int, wanted: int | None) -> int:
    """The maximum length of a text in tokens: `wanted`, or the smallest of the model's limits.

    Args:
        limits: from the model's files; None or a huge number if not set.
        positions: the network's number of positions.

    Raises:
        ConfigError: `wanted` is out of range, or neither it nor a limit is set.
    """
    if wanted is None:
        own = [limit for limit in (*limits, positions) if limit is not None and 0 < limit < _NO_LIMIT]
        if not own:
            raise ConfigError("the model states no maximum length; set ``max_model_len``")
        return int(min(own))
    largest = positions or _NO_LIMIT
    if not smallest <= wanted <= largest:
        raise ConfigError(f"``max_model_len`` is {wanted}; this model takes {smallest} to {largest} tokens")
    return wanted
