"""What a server takes on, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Each bound is checked before what it bounds costs memory or time.

    Raises:
        ConfigError: one is not above zero.
    """

    max_requests: int = 4_096
    """Records accepted and not yet answered; more are refused with 429."""
    max_cost: float | None = None
    """What those may cost together, in the engine's unit; None for what suits the engine."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Of a request that is no upload."""
    max_image_body_bytes: int = 32 * 1024 * 1024
    """The same, where the model takes images."""
    max_file_bytes: int = 1024 * 1024 * 1024
    """Of an uploaded batch file; it goes to disk as it comes."""
    max_header_bytes: int = 32 * 1024
    """Request line and headers together."""
    max_prompts: int = 2_048
    """Texts in one request."""
    max_prompt_chars: int = 1_000_000
    """Characters of one text, or of one chat."""
    timeout_s: float = 300.0
    """Of a request that names none."""
    body_timeout_s: float = 30.0
    """From the first byte of a request to the last one of its body; of an upload, between two blocks."""
    write_timeout_s: float = 30.0
    """How long a client may leave a stream unread."""
    drain_s: float = 30.0
    """How long what is in flight may take after SIGTERM."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ConfigError(f"{field.name} is {value!r}: it must be > 0")
