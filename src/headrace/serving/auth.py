"""API keys: authentication and per-key limits."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import ConfigError
from headrace.serving.errors import ApiError
from headrace.serving.limits import KeySettings as KeySettings

KEYS = "HEADRACE_API_KEYS"
"""The environment variable with keys."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner whose files and batches a request may use."""

    name: str | None = None
    """The key's name; None without keys."""
    sees_all: bool = True

    def owns(self, owner: str | None) -> bool:
        """Whether this tenant may use the objects of `owner`. Objects created without keys have no owner."""
        return self.sees_all or owner == self.name


EVERYBODY = Tenant()
"""The tenant of every request when no keys are set."""


@dataclass(frozen=True, slots=True)
class KeyUsage:
    requests: int
    refused: int
    """The part of `requests` that the key's own limits refused."""
    running: int


class KeyAccount:
    """The usage of a key, checked against its limits."""

    def __init__(self, settings: KeySettings, now: float) -> None:
        self.settings = settings
        self.tenant = Tenant(settings.name, settings.admin)
        self.running = 0
        self.requests = 0
        self.refused = 0
        self._tokens = float(settings.per_minute or 0)
        self._filled = now

    def change(self, settings: KeySettings, now: float) -> None:
        """Take new settings; what is used of the limits stays."""
        if self.settings.per_minute is None:
            self._tokens, self._filled = float(settings.per_minute or 0), now
        self.settings = settings
        self.tenant = Tenant(settings.name, settings.admin)

    def enter(self, now: float) -> None:
        """Count a request. Raises ApiError: 429 if a limit of the key is reached."""
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
            message = f"this key is limited to {settings.max_concurrent} concurrent requests"
            raise ApiError(429, message, code="key_limit", retry_after_s=1)
        if settings.per_minute is not None:
            rate = settings.per_minute / 60
            self._tokens = min(self._tokens + (now - self._filled) * rate, settings.per_minute)
            self._filled = now
            if self._tokens < 1:
                message = f"this key is limited to {settings.per_minute} requests per minute"
                raise ApiError(429, message, code="key_limit", retry_after_s=(1 - self._tokens) / rate)
            self._tokens -= 1

    def leave(self) -> None:
        """Count a request as finished."""
        self.running -= 1


class Keys:
    """The keys of a server. Without keys, every request is allowed."""

    def __init__(self, keys: Iterable[KeySettings] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts = [KeyAccount(key, clock()) for key in keys]
        self._former: list[KeyAccount] = []
        """Accounts of keys that are no longer valid: their requests stay counted."""

    @property
    def required(self) -> bool:
        return bool(self._accounts)

    @property
    def has_admin(self) -> bool:
        return any(account.settings.admin for account in self._accounts)

    def replace(self, keys: Sequence[KeySettings]) -> bool:
        """Take other keys from now on, at least one; returns whether they differ. Requests under way go on."""
        if [account.settings for account in self._accounts] == list(keys):
            return False
        now = self._clock()
        known = {account.settings.digest: account for account in (*self._former, *self._accounts)}
        self._accounts = [known.pop(key.digest, KeyAccount(key, now)) for key in keys]
        for account, key in zip(self._accounts, keys, strict=True):
            account.change(key, now)
        self._former = list(known.values())
        return True

    def account(self, headers: Iterable[tuple[bytes, bytes]]) -> KeyAccount | None:
        """The account of the key in `headers`; None without keys. Raises ApiError: 401 for a missing or unknown key."""
        if not self.required:
            return None
        presented = _presented(headers)
        if presented is None:
            raise ApiError(401, 'no API key: send "Authorization: Bearer KEY"', code="missing_api_key")
        digest = hashlib.sha256(presented).digest()
        found: KeyAccount | None = None
        for account in self._accounts:  # compare with every key, so that the time reveals nothing
            if hmac.compare_digest(account.settings.digest, digest):
                found = account
        if found is None:
            raise ApiError(401, "the API key is unknown", code="invalid_api_key")
        return found

    def check_metrics(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check that the request may read the metrics, which name all keys. If any admin key exists, only those may.

        Raises:
            ApiError: 401 or 403.
        """
        account = self.account(headers)
        if account is not None and self.has_admin and not account.settings.admin:
            raise ApiError(403, "the metrics need an admin key", code="admin_only")

    def use(self) -> dict[str, KeyUsage]:
        found: dict[str, KeyUsage] = {}
        for account in (*self._former, *self._accounts):
            total = found.get(account.settings.name, KeyUsage(0, 0, 0))
            found[account.settings.name] = KeyUsage(
                total.requests + account.requests, total.refused + account.refused, total.running + account.running
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
    """Read keys from a file and from `HEADRACE_API_KEYS`, a comma-separated list; None for none.

    A line of the file is `KEY`, or `NAME KEY [admin] [per_minute=N] [max_concurrent=N]`; `#` at the start of a word
    starts a comment. Keys with the same name share files and batches, so a key can be rotated.

    Raises:
        ConfigError: the file or the variable holds no key, or cannot be read, a line is malformed, or a key is given
            twice.
    """
    keys = [_settings(None, key.strip(), KEYS) for key in (environment or "").split(",") if key.strip()]
    if environment is not None and not keys:
        raise ConfigError(
            f"{KEYS} is set but holds no key; without one, the server would be open to everyone; give a key or unset it"
        )
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read API key file {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        found = [_parse(f"API key file {path}, line {number}", _words(line)) for number, line in enumerate(lines, 1)]
        if not any(found):
            raise ConfigError(f"API key file {path} holds no key; without one, the server would be open to everyone")
        keys += [key for key in found if key is not None]
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("an API key is given twice; give each key once")
    return keys


def _words(line: str) -> list[str]:
    words = line.split()
    return words[: next((place for place, word in enumerate(words) if word.startswith("#")), None)]


def _parse(where: str, words: list[str]) -> KeySettings | None:
    if not words:
        return None
    if len(words) == 1:
        return _settings(None, words[0], where)
    if words[1] == "admin" or words[1].startswith(("per_minute=", "max_concurrent=")):
        raise ConfigError(f"{where}: a key with admin or limits needs a name before the key")
    key = _settings(words[0], words[1], where)
    for word in words[2:]:
        name, _, value = word.partition("=")
        if word == "admin":
            key = replace(key, admin=True)
        elif name == "per_minute" and value.isdigit() and int(value) >= 1:
            key = replace(key, per_minute=int(value))
        elif name == "max_concurrent" and value.isdigit() and int(value) >= 1:
            key = replace(key, max_concurrent=int(value))
        else:
            raise ConfigError(f"{where}: {word!r} is neither admin, per_minute=N nor max_concurrent=N with N >= 1")
    return key


def _settings(name: str | None, key: str, where: str) -> KeySettings:
    if not key.isprintable():
        raise ConfigError(f"{where}: the key has a character that cannot be seen; write it again")
    digest = hashlib.sha256(key.encode()).digest()
    # Not named by line number: adding or removing a line must not give a key's files to another key.
    return KeySettings(name or f"key-{digest.hex()[:12]}", digest)
