"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Sizes, counts and times. Each limit is checked before the work it bounds begins.

    Raises:
        ConfigError: a limit is not above zero.
    """

    max_wait_s: float = 60.0
    """Forecast seconds that a request waits for others. Those that would wait longer are refused with 429."""
    max_requests: int = 262_144
    """Records accepted and not yet answered. More are refused with 429."""
    max_cost: float | None = None
    """Their total cost, in the engine's unit. None for no limit."""
    max_waiting_bytes: int = 256 * 1024 * 1024
    """Bodies of accepted requests together, in bytes. More are refused with 429."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Size of a request body, except file uploads."""
    max_file_bytes: int = 1024 * 1024 * 1024
    """Size of an uploaded batch file. Uploads are streamed to disk."""
    max_header_bytes: int = 32 * 1024
    """Request line and headers together."""
    max_prompts: int = 2_048
    """Texts per request."""
    max_prompt_chars: int = 1_000_000
    """Characters per text or chat."""
    timeout_s: float = 300.0
    """Default timeout of a request."""
    body_timeout_s: float = 30.0
    """Time to receive a whole request. For an upload, the time between two blocks."""
    keep_alive_s: int = 75
    """Time that a connection may wait for its next request. Longer than clients keep one, as a rule: they use it again
    without losing a request to its end."""
    write_timeout_s: float = 30.0
    """Time a client may leave a stream unread."""
    drain_s: float = 30.0
    """Time for requests in flight to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ConfigError(f"{field.name} is {value!r}: it must be > 0")
