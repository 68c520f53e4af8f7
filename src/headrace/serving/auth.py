"""API keys: who may call, and how much each may ask for."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class KeySettings:
    """One key."""

    name: str
    """In logs and as the caller that batches are shared among; never the key itself."""
    digest: bytes
    """SHA-256 of the key: the key itself is kept nowhere."""
    per_minute: int | None = None
    """Requests a minute; None for no limit."""
    max_concurrent: int | None = None
    """Requests at the same time; None for no limit."""
    admin: bool = False
    """Whether it sees the files and batches of all."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose files and batches a request may see and use."""

    name: str | None = None
    """The key's; None where no keys are set."""
    sees_all: bool = True

    def owns(self, owner: str | None) -> bool:
        """Whether what this owner has made is there for this tenant. What was made without keys belongs to nobody."""
        return self.sees_all or owner == self.name


EVERYBODY = Tenant()
"""Where no keys are set, all see all."""


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What was done with a key."""

    requests: int
    refused: int
    """Of those, by the key's own limits."""
    running: int


class KeyAccount:
    """What a key has used."""

    def __init__(self, settings: KeySettings, now: float) -> None:
        self.settings = settings
        self.tenant = Tenant(settings.name, settings.admin)
        self.running = 0
        self.requests = 0
        self.refused = 0
        self._tokens = float(settings.per_minute or 0)
        self._filled = now

    def enter(self, now: float) -> None:
        """Count a request.

        Raises:
            ApiError: 429, the key's limit is reached.
        """
        self.requests += 1
        try:
            self._check(now)
        except ApiError:
            self.refused += 1
            raise
        self.running += 1

    def _check(self, now: float) -> None:
        settings = self.settings
        if settings.max_concurrent is not None and self.running >= settings.max_concurrent:
            raise ApiError(
                429,
                f"this key may have {settings.max_concurrent} requests at the same time",
                code="key_limit",
                retry_after_s=1,
            )
        if settings.per_minute is not None:
            rate = settings.per_minute / 60
            self._tokens = min(self._tokens + (now - self._filled) * rate, settings.per_minute)
            self._filled = now
            if self._tokens < 1:
                raise ApiError(
                    429,
                    f"this key may send {settings.per_minute} requests a minute",
                    code="key_limit",
                    retry_after_s=(1 - self._tokens) / rate,
                )
            self._tokens -= 1

    def leave(self) -> None:
        """A counted request has been answered."""
        self.running -= 1


class Keys:
    """The keys of a server; none lets everybody in."""

    def __init__(self, keys: Iterable[KeySettings] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts = [KeyAccount(key, clock()) for key in keys]
        self.required = bool(self._accounts)
        self.has_admin = any(account.settings.admin for account in self._accounts)

    def account(self, headers: Iterable[tuple[bytes, bytes]]) -> KeyAccount | None:
        """Whose request this is; None where no keys are set.

        Raises:
            ApiError: 401 without a key or with one that is not known.
        """
        if not self.required:
            return None
        presented = _presented(headers)
        if presented is None:
            raise ApiError(401, 'no API key: send "Authorization: Bearer KEY"', code="missing_api_key")
        digest = hashlib.sha256(presented).digest()
        found: KeyAccount | None = None
        for account in self._accounts:  # all of them, whichever it is: the time tells nothing
            if hmac.compare_digest(account.settings.digest, digest):
                found = account
        if found is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return found

    def check_metrics(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Who may read the metrics, which name all keys: the admin, or any key where there is none.

        Raises:
            ApiError: 401 or 403.
        """
        account = self.account(headers)
        if account is not None and self.has_admin and not account.settings.admin:
            raise ApiError(403, "the metrics are for an admin key", code="admin_only")

    def use(self) -> dict[str, KeyUsage]:
        """What was done with the keys of each name."""
        found: dict[str, KeyUsage] = {}
        for account in self._accounts:
            sofar = found.get(account.settings.name, KeyUsage(0, 0, 0))
            found[account.settings.name] = KeyUsage(
                sofar.requests + account.requests, sofar.refused + account.refused, sofar.running + account.running
            )
        return found

    def enter(self, account: KeyAccount) -> None:
        """Count a request; raises ApiError 429 at the key's limit."""
        account.enter(self._clock())


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" and key.strip() else None
        if name == b"x-api-key":
            return value.strip() or None
    return None


def read_keys(path: Path | None, environment: str | None) -> list[KeySettings]:
    """Keys from a file and from the environment's `HEADRACE_API_KEYS`, which holds keys between commas.

    A line of the file is `KEY`, or `NAME KEY [admin] [per_minute=N] [max_concurrent=N]`; `#` begins a comment. Keys of
    one name share what is theirs, so that one can follow another.

    Raises:
        ConfigError: the file cannot be read or holds no key, a line is none of these, or a key comes twice.
    """
    keys = [_settings(None, key.strip(), {}) for key in (environment or "").split(",") if key.strip()]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read API key file {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        found = [_parse(path, number, line.split("#")[0].split()) for number, line in enumerate(lines, 1)]
        keys += [key for key in found if key is not None]
        if not any(found):
            raise ConfigError(f"API key file {path} holds no key; a server would be open to all without one")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("an API key comes twice; each must be given once")
    return keys


def _parse(path: Path, number: int, words: list[str]) -> KeySettings | None:
    if not words:
        return None
    if len(words) == 1:
        return _settings(None, words[0], {})
    if words[1] == "admin" or words[1].startswith(("per_minute=", "max_concurrent=")):
        raise ConfigError(f"API key file {path}, line {number}: a key with admin or limits needs a name before it")
    given: dict[str, Any] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if word == "admin":
            given["admin"] = True
        elif name in ("per_minute", "max_concurrent") and value.isdigit() and int(value) >= 1:
            given[name] = int(value)
        else:
            raise ConfigError(
                f"API key file {path}, line {number}: {word!r} is neither admin, per_minute=N nor max_concurrent=N "
                "with N >= 1"
            )
    return _settings(words[0], words[1], given)


def _settings(name: str | None, key: str, given: Mapping[str, Any]) -> KeySettings:
    digest = hashlib.sha256(key.encode()).digest()
    # Not by its place: what a key owns must not pass to another when a line is added or taken away.
    return KeySettings(name or f"key-{digest.hex()[:12]}", digest, **given)
