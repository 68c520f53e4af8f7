"""Batches of embedding requests, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch
from tests.waiting import until


def rows(count: int) -> list[dict[str, Any]]:
    """Requests `0` to `count - 1`."""
    return [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {n}"}}
        for n in range(count)
    ]


def begin(client: OpenAI, folder: Path, requests: int | Iterable[dict[str, Any] | str]) -> Batch:
    """A batch of so many requests, or of these lines."""
    lines = rows(requests) if isinstance(requests, int) else requests
    path = folder / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    file = client.files.create(file=path, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")


def ended(client: OpenAI, identity: str, seconds: float = 60) -> Batch:
    """The batch, once it has ended."""

    def found() -> Batch | None:
        batch = client.batches.retrieve(identity)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    batch = until(found, seconds)
    assert batch is not None
    return batch
