"""What is said where no cluster can be used. These need Ray, and no cluster."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import ConfigError


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_no_cluster_at_the_address_is_said_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    from headrace.cluster.ray import workers as ray_workers

    monkeypatch.setattr("headrace.cluster.ray.workers.ray.is_initialized", lambda: False)
    # It would try for minutes.
    monkeypatch.setattr("headrace.cluster.ray.workers.ray.init", lambda **_: pytest.fail("Ray is asked to connect"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = form.format(f"127.0.0.1:{taken.getsockname()[1]}")
        with (
            pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"),
            ray_workers.connected(ray_workers.ClusterResources(address)),
        ):
            pass


def test_what_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    from headrace.cluster.ray import workers as ray_workers

    monkeypatch.setattr("headrace.cluster.ray.workers.ray.is_initialized", lambda: False)
    with (
        pytest.raises(ConfigError, match="'head-node' is not the address"),
        ray_workers.connected(ray_workers.ClusterResources("head-node")),
    ):
        pass


@pytest.mark.usefixtures("cluster")
def test_who_is_connected_is_not_asked_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit` leaves that of its own server in the environment."""
    from headrace.cluster.ray import workers as ray_workers

    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with ray_workers.connected(ray_workers.ClusterResources()):
        pass
    with (
        pytest.raises(ConfigError, match="'head-node' is not the address"),
        ray_workers.connected(ray_workers.ClusterResources("head-node")),
    ):
        pass


@pytest.mark.parametrize("failures", [1, 2])
def test_a_client_server_that_could_not_start_is_asked_once_more(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forks a process for each client, which now and then does not live: that cannot be had at will."""
    pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    from headrace.cluster.ray import workers as ray_workers

    tried = []

    def init(**options: object) -> None:
        tried.append(options["address"])
        if len(tried) <= failures:
            raise ConnectionAbortedError(
                "Initialization failure from server:\nTraceback (most recent call last):\n  File a, line 1\nZombie: 7\n"
            )

    monkeypatch.setattr("headrace.cluster.ray.workers.ray.is_initialized", lambda: False)
    monkeypatch.setattr("headrace.cluster.ray.workers.ray.init", init)
    monkeypatch.setattr("headrace.cluster.ray.workers.ray.shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        if failures == 1:
            with ray_workers.connected(ray_workers.ClusterResources(address)):
                pass
        else:
            with (
                pytest.raises(
                    ConfigError, match=rf"cannot use .* at {address}: Init\w+ failure from server: Zombie: 7 \("
                ),
                ray_workers.connected(ray_workers.ClusterResources(address)),
            ):
                pass
    assert tried == [address, address]
