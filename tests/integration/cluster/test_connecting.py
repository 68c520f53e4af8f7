"""What is said where no cluster can be used. These need Ray, and no cluster."""

from __future__ import annotations

import socket
import time

import pytest

from headrace.errors import ConfigError


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_no_cluster_at_the_address_is_said_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    from headrace.cluster import ray_workers

    monkeypatch.setattr("headrace.cluster.ray_workers.ray.is_initialized", lambda: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = form.format(f"127.0.0.1:{taken.getsockname()[1]}")
        started = time.monotonic()
        with (
            pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"),
            ray_workers.connected(ray_workers.Place(address)),
        ):
            pass
    assert time.monotonic() - started < 10


def test_what_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    from headrace.cluster import ray_workers

    monkeypatch.setattr("headrace.cluster.ray_workers.ray.is_initialized", lambda: False)
    with (
        pytest.raises(ConfigError, match="'head-node' is no address"),
        ray_workers.connected(ray_workers.Place("head-node")),
    ):
        pass


@pytest.mark.usefixtures("cluster")
def test_who_is_connected_is_not_asked_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit` leaves that of its own server in the environment."""
    from headrace.cluster import ray_workers

    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with ray_workers.connected(ray_workers.Place()):
        pass
    with (
        pytest.raises(ConfigError, match="'head-node' is no address"),
        ray_workers.connected(ray_workers.Place("head-node")),
    ):
        pass
