"""The limits of a server and of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.argument_types import check_types, named, parse_size
from headrace.options import option


@dataclass(frozen=True, slots=True)
class KeySettings:
    name: str
    """Used in logs and for fair batching among callers. Never the key itself."""
    digest: bytes
    """SHA-256 of the key. The key itself is not stored."""
    per_minute: int | None = None
    """Requests per minute; None for no limit."""
    max_concurrent: int | None = None
    """Concurrent requests; None for no limit."""
    admin: bool = False
    """Whether it sees the files and batches of all keys."""


@named()
@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Sizes, counts and times. Each limit is checked before the work it bounds begins.

    Raises:
        ConfigError: a limit is not above zero.
    """

    panel: ClassVar[str] = "Server"

    max_wait_s: float = option(
        60.0,
        "Seconds that a request may wait for others, by forecast; others get status 429.",
        flags=("--max-wait",),
        above=0,
    )
    max_requests: int = option(
        262_144, "Maximum records accepted but not yet answered; more get status 429.", minimum=1
    )
    max_cost: float | None = option(
        None, "Their maximum total cost, in tokens for texts; more get status 429. Default: no limit.", above=0
    )
    max_waiting_bytes: int = option(
        256 * 1024 * 1024,
        "Maximum bytes of their request bodies together, such as 256MiB; more get status 429.",
        parse=parse_size,
        shown="256MiB",
        minimum=1,
    )
    max_body_bytes: int = option(
        32 * 1024 * 1024,
        "Maximum bytes of one request body, such as 32MiB; longer ones get status 413.",
        parse=parse_size,
        shown="32MiB",
        minimum=1,
    )
    max_file_bytes: int = option(
        1024 * 1024 * 1024,
        "Maximum bytes of an uploaded batch file.",
        flags=(),
        parse=parse_size,
        shown="1GiB",
        minimum=1,
    )
    max_header_bytes: int = option(
        32 * 1024, "Maximum bytes of request line and headers.", flags=(), parse=parse_size, shown="32KiB", minimum=1
    )
    max_prompts: int = option(
        2_048,
        "Maximum texts, images or messages of one request; more get status 400.",
        flags=("--max-inputs",),
        minimum=1,
    )
    max_prompt_chars: int = option(
        1_000_000,
        "Maximum characters of one text or chat; longer ones get status 400.",
        flags=("--max-input-chars",),
        minimum=1,
    )
    timeout_s: float = option(
        300.0, "Seconds allowed for a request that sets no time limit.", flags=("--timeout",), above=0
    )
    body_timeout_s: float = option(
        30.0, "Seconds to receive a whole request; for an upload, between two blocks.", flags=(), above=0
    )
    keep_alive_s: int = option(
        75, "Seconds that a connection may wait for its next request.", flags=("--keep-alive-timeout",), minimum=1
    )
    """Longer than clients keep one, as a rule: they use it again without losing a request to its end."""
    write_timeout_s: float = option(30.0, "Seconds that a client may leave a stream unread.", flags=(), above=0)
    drain_s: float = option(
        30.0, "Seconds allowed for accepted requests to finish after SIGTERM.", flags=("--drain-timeout",), above=0
    )

    def __post_init__(self) -> None:
        check_types(self)
