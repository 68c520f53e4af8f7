"""Binds the address of a server."""

from __future__ import annotations

import errno
import ipaddress
import socket

from headrace.errors import ConfigError


def bind(host: str, port: int, name: str = "port") -> socket.socket:
    """A socket bound to the address, which does not listen yet.

    Args:
        name: the setting of the port.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = "host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else name
        message = f"cannot listen on {host} port {port}: {error.strerror}; choose another ``{other}``"
        raise ConfigError(message) from error
    return listener


def only_here(host: str) -> bool:
    """Whether the address can be reached from this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:  # the one who binds it says so
        return False
    return bool(found) and all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)
