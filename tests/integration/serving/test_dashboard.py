"""What a running server shows of itself, to whom, and what that costs it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.integration.serving.running import Running, running
from tests.waiting import until

from headrace.app.servers.job_dashboard import serve_dashboard
from headrace.app.servers.observed import ObservedServer
from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.observe.live.frame import Frame, parse_frame
from headrace.observe.page.dashboard import dashboard
from headrace.serving.auth import read_keys
from headrace.serving.limits import ServeLimits

SHOWN = ("/dashboard/state", "/dashboard/events", "/report")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    settings = ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"), name="</script><b>")
    with running(settings) as found:
        yield found


def state(server: Running) -> Frame:
    return parse_frame(server.client.get("/dashboard/state").content)


def embed(server: Running, count: int = 1) -> None:
    for _ in range(count):
        assert server.post("/v1/embeddings", {"input": ["a text", "another"]}).status_code == 200


def test_the_state_counts_what_clients_did(server: Running) -> None:
    before = state(server)
    embed(server, 5)
    assert server.post("/v1/embeddings", {"input": []}).status_code == 400
    until(lambda: state(server).counts["requests"] == before.counts["requests"] + 6)  # one frame a second
    after = state(server)
    assert after.counts["records"] - before.counts["records"] == 10
    assert after.errors["400 on /v1/embeddings"] == 1
    assert after.name == "</script><b>"
    assert [(row.name, row.state) for row in after.replicas] == [("</script><b>", "loaded")]
    assert sum(after.causes_of_all.values()) == pytest.approx(1)
    assert {"starting", "idle"} <= after.causes_of_all.keys()


def test_the_report_is_drawn_while_the_server_serves(server: Running) -> None:
    embed(server)
    page = server.client.get("/report")
    assert page.headers["content-type"].startswith("text/html")
    assert "request duration (s)" in page.text
    assert "no requests" in page.text
    assert "<b>" not in page.text.split("<body>")[1].split("<section")[0]
    assert "&lt;/script&gt;&lt;b&gt;" in page.text


def test_two_hundred_viewers_share_one_frame_a_second(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    frame = ObservedServer.frame

    def counted(self: ObservedServer) -> tuple[bytes, bool]:
        nonlocal made
        made += 1
        return frame(self)

    monkeypatch.setattr(ObservedServer, "frame", counted)

    async def watch(client: httpx.AsyncClient) -> int:
        seen = 0
        async with client.stream("GET", "/dashboard/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    parse_frame(line.removeprefix("data: "))
                    seen += 1
                if seen == 4:
                    return seen
        return seen

    async def crowd() -> list[int]:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(watch(client) for _ in range(200)))

    time.sleep(1)  # a frame is a second old at most
    requests = state(server).counts["requests"]
    started = time.monotonic()
    assert asyncio.run(crowd()) == [4] * 200
    assert made <= time.monotonic() - started + 3
    until(lambda: server.host.in_progress == 0)
    assert state(server).counts["requests"] == requests
    assert 'route="/dashboard/events"' not in server.client.get("/metrics").text


def test_a_viewer_takes_no_slot_and_does_not_delay_the_end() -> None:
    config = EngineConfig(task="embed", engine="headrace.testing:FakeEngine")
    settings = ServerSettings(config, limits=ServeLimits(drain_s=3_600))
    seen = threading.Event()
    ended = threading.Event()

    def watch(url: str) -> None:
        with httpx.stream("GET", f"{url}/dashboard/events", timeout=60) as answer:
            for _ in answer.iter_lines():
                seen.set()
        ended.set()

    with running(settings) as server:
        viewer = threading.Thread(target=watch, args=(server.url,))
        viewer.start()
        assert seen.wait(60)
        assert server.host.in_progress == 0
        server.server._drain()
        assert ended.wait(60)
        viewer.join()


def test_only_who_may_see_the_metrics_sees_the_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("user secret-1 per_minute=1 max_concurrent=1\nboss secret-2 admin\n")
    config = EngineConfig(task="embed", engine="headrace.testing:FakeEngine")
    with running(ServerSettings(config, keys=read_keys(file, None))) as server:
        page = server.client.get("/dashboard")
        assert page.status_code == 200
        assert "script-src 'sha256-" in page.headers["content-security-policy"]
        for path in SHOWN:
            for key, status in ((None, 401), ("wrong", 401), ("secret-1", 403)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = server.client.get(path, headers=headers)
                assert answer.status_code == status, (path, key)
        boss = {"Authorization": "Bearer secret-2"}
        for _ in range(3):
            assert server.client.get("/dashboard/state", headers=boss).status_code == 200
        used = server.client.get("/metrics", headers=boss).text
        assert 'headrace_key_requests_total{key="boss"} 0.0' in used


def test_head_and_post_do_not_open_a_stream(server: Running) -> None:
    assert server.client.head("/dashboard/events").status_code == 200
    answer = server.post("/dashboard/events", {})
    assert answer.status_code == 405
    assert json.loads(answer.text)["error"]["code"]


def test_too_many_viewers_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.live.MOST_VIEWERS", 0)
    answer = server.client.get("/dashboard/events")
    assert answer.status_code == 503
    assert "viewers watch already" in answer.text


def test_the_time_of_the_device_is_a_counter(server: Running) -> None:
    def seconds() -> float:
        page = server.client.get("/metrics").text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("headrace_device_seconds_"
                                                                                            "total"))  # fmt: skip

    started = time.monotonic()
    before, began = seconds(), time.monotonic()
    embed(server, 3)
    time.sleep(0.2)
    least = time.monotonic() - began
    counted = seconds() - before
    assert least - 0.1 < counted < time.monotonic() - started + 0.1


class Shown:
    """What shows nothing."""

    page = dashboard()

    def frame(self) -> tuple[bytes, bool]:
        return b"{}", False

    def report(self) -> str:
        return ""


def test_a_job_s_dashboard_says_what_it_lacks() -> None:
    with serve_dashboard(Shown(), 0) as address:
        found = httpx.get(address.replace("/dashboard", "/v1/embeddings"), timeout=60)
    assert found.status_code == 404
    assert "there is no route '/v1/embeddings'" in found.json()["error"]["message"]
