"""The names by which a server may be called."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Sequence

from headrace.errors import ConfigError
from headrace.serving.errors import ApiError
from headrace.wording import shown

LOCAL = ("localhost", "*.localhost")
_PATTERN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.ASCII | re.IGNORECASE)


class Hosts:
    """Checks the `Host` of requests: against DNS rebinding, by which a web page reaches a server that its reader can.

    The page's own name is then the host. So any IP address is allowed, and a request without a host.

    Args:
        allowed: names; `*.example.com` stands for all below it. None for every name.

    Raises:
        ConfigError: a name is not a host name.
    """

    def __init__(self, allowed: Sequence[str] | None) -> None:
        for name in allowed or ():
            if name != "*" and not _PATTERN.fullmatch(name) and not _is_address(name):
                raise ConfigError(
                    f"allowed host {name!r} is not a host name: give a name without scheme and port, *.NAME or *"
                )
        names = [name.lower().rstrip(".") for name in allowed or ()]
        self._checks = allowed is not None and "*" not in names
        self._names = frozenset(names)
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._allows = functools.lru_cache(256)(self._is_allowed)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise ApiError 400 for a request to another host."""
        if not self._checks:
            return
        for name, value in headers:
            if name == b"host" and not self._allows(value):
                host = value.decode("latin-1")
                way_out = "start it with ``allowed_hosts=NAME`` to allow a name"
                message = f"this server is not called {shown(host, 200)}: {way_out}"
                raise ApiError(400, message, code="host_not_allowed")

    def _is_allowed(self, value: bytes) -> bool:
        host = value.decode("latin-1").strip().lower()
        host = re.sub(r":\d*$", "", host, count=1) if host.startswith("[") or host.count(":") == 1 else host
        host = host.rstrip(".")
        return host in self._names or host.endswith(self._below) or _is_address(host.strip("[]"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
