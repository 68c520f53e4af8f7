"""One batch of the Batch API: its request, progress and serialization."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from headrace.records import JsonObject


class BatchStatus(StrEnum):
    """OpenAI's statuses of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether the batch has not ended."""
        return self in OPEN


OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
ENDED = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)
_TIMED = tuple(status for status in BatchStatus if status is not BatchStatus.VALIDATING)
"""Statuses with a timestamp field. `validating` starts at `created_at`."""
_PLAIN = (
    "input_file_id", "completion_window", "status", "output_file_id", "error_file_id", "created_at", "expires_at",
)  # fmt: skip
"""Fields that OpenAI's batch object has as they are, beside others."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """An immutable snapshot of a batch. Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    owner: str | None = None
    """The tenant; None if the server had no keys."""
    status: BatchStatus = BatchStatus.VALIDATING
    times: Mapping[BatchStatus, int] = field(default_factory=dict)
    """When each status began."""
    counts: RequestCounts = RequestCounts()
    errors: Sequence[Mapping[str, object]] = ()
    """Why it failed; see `openai_protocol.batch_error`."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_after_s: int | None = None
    """Seconds after which its output files are deleted; None for never."""

    def with_status(self, status: BatchStatus, at: int) -> StoredBatch:
        """The same batch in another status since `at`."""
        return replace(self, status=status, times={**self.times, status: at})

    def as_json(self) -> JsonObject:
        """OpenAI's batch object with an additional `owner`, for responses and for the disk."""
        expires: JsonObject = {}
        if self.output_expires_after_s is not None:
            expires = {"output_expires_after": {"anchor": "created_at", "seconds": self.output_expires_after_s}}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            **{name: getattr(self, name) for name in _PLAIN},
            **{f"{status}_at": self.times.get(status) for status in _TIMED},
            "request_counts": asdict(self.counts),
            "metadata": self.metadata,
            "owner": self.owner,
            **expires,
        }

    def encode(self) -> bytes:
        return json.dumps(self.as_json()).encode()

    @classmethod
    def decode(cls, content: bytes) -> StoredBatch:
        """Read the output of `encode`, of this or an earlier version.

        Raises:
            ValueError, KeyError, TypeError: the content is damaged.
        """
        found = json.loads(content)
        counts, errors = found["request_counts"], found["errors"] or {"data": ()}
        times = {status: found.get(f"{status}_at") for status in _TIMED}
        given = {name: found[name] for name in ("id", "endpoint", *_PLAIN)}
        given |= {name: int(found[name]) for name in ("created_at", "expires_at")}
        given |= {name: found.get(name) for name in ("metadata", "owner")}
        given["status"] = BatchStatus(found["status"])
        return cls(
            **given,
            times={status: at for status, at in times.items() if at is not None},
            counts=RequestCounts(counts["total"], counts["completed"], counts["failed"]),
            errors=tuple(errors["data"]),
            output_expires_after_s=(found.get("output_expires_after") or {}).get("seconds"),
        )
