"""What the peers serve, and how they are set: batches of 64, as many as there are callers, and 2 ms for company."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

PATH = "/v1/embeddings"
BATCH, WAIT_S = 64, 0.002

Vectors = Sequence[Sequence[float]]


def load() -> Callable[[list[str]], Vectors]:
    """What turns texts into vectors: nothing much, or the sentence-transformers model in the folder `MODEL`."""
    model = os.environ["MODEL"]
    if model == "noop":
        return lambda texts: [[0.5, 0.25]] * len(texts)
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu")
    return lambda texts: encoder.encode(texts).tolist()  # type: ignore[no-any-return]


def reply(vector: Sequence[float]) -> dict[str, Any]:
    """OpenAI's answer for one text."""
    data = [{"object": "embedding", "index": 0, "embedding": vector}]
    return {"object": "list", "data": data, "model": "noop", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
