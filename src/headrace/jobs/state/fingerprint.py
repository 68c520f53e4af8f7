"""Compare the settings that an output was started with to the present ones."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.errors import ResumeMismatchError

_FLAGS = {
    "source.selection.limit": "--limit",
    "source.selection.sample": "--sample",
    "source.selection.sample_seed": "--sample-seed",
    "source.selection.shard": "--shard",
    "engine.dtype": "--dtype",
    "engine.max_model_len": "--max-model-len",
    "engine.chunk_join": "--chunk-join",
    "engine.chunk_overlap": "--chunk-overlap",
    "engine.no_answer": "--no-answer",
    "engine.on_too_long": "--on-too-long",
    "engine.reduce_template": "--reduce-template",
    "engine.commit": "--model",
    "engine.model_digest": "--model",
    "id_column": "--id-column",
    "keep_columns": "--keep-columns",
    "prompt_template": "--prompt-template",
    "task": "--task",
    "text_column": "--text-column",
    "text_pair_column": "--text-pair-column",
}
"""The command-line flag of each setting."""


def check_same(output: object, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Check that a job matches the one that started its output.

    Raises:
        ResumeMismatchError: it does not; the message names each difference.
    """
    old, new = _flat(then), _flat(now)
    differences = [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}{f' ({_FLAGS[key]})' if key in _FLAGS else ''}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    if differences:
        raise ResumeMismatchError(
            f"{output} was started with other settings: {'; '.join(differences)}. Restore that, choose another output, "
            "pass --overwrite to start again, or --ignore-changes to keep what is finished and continue"
        )


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as dotted keys; values as JSON gives them back."""
    flat: dict[str, object] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(inner))
    return flat
