"""SIGTERM: what was accepted is answered, what comes later is refused, and the process ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.acceptance.serving.process import server
from tests.waiting import until

ENGINES = "tests.integration.serving.engines"
TALK = ("--task", "generate", "--engine", f"{ENGINES}:SlowTalker")
WORDS = " ".join(f"w{n}" for n in range(30))
"""1.2 s of a `SlowTalker`."""


def accepted(url: str) -> float:
    return metric(url, "headrace_accepted_records")


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def talks() -> list[tuple[str, dict[str, Any]]]:
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 100}
    text = {"prompt": WORDS, "max_tokens": 100}
    return [
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {**text, "stream": True}),
        ("/v1/chat/completions", {**chat, "stream": True}),
    ]


def said(path: str, answer: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, last = [line[6:] for line in answer.text.splitlines() if line]
        assert last == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        choices = [answer.json()["choices"][0]]
    if path == "/v1/completions":
        return "".join(choice["text"] for choice in choices)
    return "".join(choice.get("message", choice.get("delta")).get("content", "") for choice in choices)


def test_every_accepted_answer_is_given_and_new_requests_are_refused(tmp_path: Path) -> None:
    asked = talks() * 3
    with (
        server(*TALK, folder=tmp_path) as (process, url),
        httpx.Client(base_url=url, timeout=60) as kept,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        assert kept.get("/health").status_code == 200
        answers = [pool.submit(post, url, path, body) for path, body in asked]
        until(lambda: accepted(url) == len(asked))
        process.send_signal(signal.SIGTERM)
        until(lambda: kept.get("/ready").status_code == 503)
        for refused in (kept.post("/v1/completions", json=asked[0][1]), post(url, *asked[1])):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_ready"
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
        assert kept.get("/health").status_code == 200  # still alive, though it takes nothing
        assert kept.get("/metrics").status_code == 200
        for (path, _), future in zip(asked, answers, strict=True):
            answer = future.result()
            assert answer.status_code == 200, answer.text
            assert said(path, answer) == WORDS
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_messages_about_the_end_are_json_too(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so it is by the server")
    with server("--engine", "headrace.testing:FakeEngine", "--task", "embed", "--log-json", folder=tmp_path) as (
        process,
        _,
    ):
        process.send_signal(number)
        said = [json.loads(line)["message"] for line in process.communicate(timeout=60)[1].splitlines()]
        assert process.returncode == 0
        assert "stopping: finishing accepted requests (press Ctrl-C again to stop at once)" in said


@pytest.mark.parametrize(
    ("task", "engine", "path", "body"),
    [
        ("embed", f"{ENGINES}:Gated", "/v1/embeddings", {"input": ["a", "b"]}),
        ("embed", f"{ENGINES}:Gated", "/generate", {"prompts": ["a", "b"]}),
        ("classify", f"{ENGINES}:GatedLabeler", "/classify", {"input": ["a", "b"]}),
    ],
)
def test_other_routes_answer_too(tmp_path: Path, task: str, engine: str, path: str, body: dict[str, Any]) -> None:
    with server("--task", task, "--engine", engine, "--batch-tokens", "2", folder=tmp_path) as (process, url):
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(post, url, path, body) for _ in range(8)]
            until(lambda: accepted(url) == 16)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
            (tmp_path / "go").touch()
            assert [future.result().status_code for future in answers] == [200] * 8
        assert process.wait(60) == 0


def test_a_download_and_an_upload_under_way_come_to_their_end(tmp_path: Path) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x" * 1_000}}
    content = (json.dumps(row) + "\n").encode() * 15_000
    with (
        server(*TALK, "--state-dir", "state", folder=tmp_path) as (process, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        sent = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, timeout=60)
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as reader, _begun_upload(port) as upload:
            reader.sendall(f"GET /v1/files/{sent.json()['id']}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            got = reader.recv(1_000)
            process.send_signal(signal.SIGTERM)
            time.sleep(4)  # longer than connections have that are merely open
            assert process.poll() is None
            upload.sendall(b"x\r\n--b--\r\n")
            assert b" 200 OK" in upload.recv(1_000)
            while len(got) < len(content) and (part := reader.recv(1 << 20)):
                got += part
        assert got.partition(b"\r\n\r\n")[2] == content
        assert process.wait(60) == 0


def _begun_upload(port: int) -> socket.socket:
    upload = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = '--b\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n'
    body = head.format("purpose", "") + "batch\r\n" + head.format("file", '; filename="a"')
    length = len(body) + len("x\r\n--b--\r\n")
    upload.sendall(
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        f"content-length: {length}\r\n\r\n{body}".encode()
    )
    return upload


def test_at_the_limit_the_rest_is_told_and_the_process_ends(tmp_path: Path) -> None:
    long = {"prompt": WORDS * 30, "max_tokens": 10_000}
    with (
        server(*TALK, "--drain-timeout", "1", folder=tmp_path) as (process, url),
        ThreadPoolExecutor(2) as pool,
    ):
        whole = pool.submit(post, url, "/v1/completions", long)
        stream = pool.submit(post, url, "/v1/completions", {**long, "stream": True})
        until(lambda: accepted(url) == 2)
        process.send_signal(signal.SIGTERM)
        assert whole.result().status_code == 503
        assert whole.result().headers["retry-after"]
        assert '"code":"stopping"' in stream.result().text.splitlines()[-2]
        assert stream.result().text.count("data: ") < 600  # a word takes 40 ms: 24 s, and by default it would be 30 s
        assert process.wait(60) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with server(*TALK, folder=tmp_path) as (process, url), ThreadPoolExecutor(1) as pool:
        answer: Future[httpx.Response] = pool.submit(post, url, "/v1/completions", {"prompt": WORDS * 30})
        until(lambda: accepted(url) == 1)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            answer.result()


def test_a_limit_that_is_met_costs_a_batch_nothing(tmp_path: Path) -> None:
    count = 400
    rows = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": "a b c d " * (n % 9 + 1)}}
        for n in range(count)
    )
    talk = (*TALK, "--state-dir", "state", "--drain-timeout", "1")
    with server(*talk, folder=tmp_path) as (process, url), ThreadPoolExecutor(1) as pool:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        sent = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{url}/v1/files", timeout=60, **sent).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        identity = post(url, "/v1/batches", body).json()["id"]
        pool.submit(post, url, "/v1/completions", {"prompt": WORDS * 30, "max_tokens": 10_000})
        until(lambda: batch(url, identity)["request_counts"]["completed"] > 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with server(*talk, folder=tmp_path) as (_, url):
        until(lambda: batch(url, identity)["status"] not in ("validating", "in_progress", "finalizing"))
        done = batch(url, identity)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}


def test_under_load_every_request_is_answered_and_no_batch_loses_a_line(tmp_path: Path) -> None:
    """Callers who never pause, on kept connections, beside three batches; and the next server finishes the batches."""
    count = 2_000
    rows = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {n}"}})
        + "\n"
        for n in range(count)
    )
    serve = (
        "--task",
        "embed",
        "--engine",
        "tests.acceptance.engines:slow",
        "--batch-tokens",
        "256",
        "--state-dir",
        "state",
    )
    stopping = threading.Event()

    def call(url: str) -> list[tuple[int, bool]]:
        """The statuses of one caller's requests, and whether each came with what it must have."""
        found = []
        with httpx.Client(base_url=url, timeout=60) as client:
            while True:
                try:
                    answer = client.post("/v1/embeddings", json={"input": ["one", "two"]})
                except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                    if stopping.is_set():  # between two requests of this caller, the server has gone
                        return found
                    raise
                good = len(answer.json()["data"]) == 2 if answer.status_code == 200 else "retry-after" in answer.headers
                found.append((answer.status_code, good))
                if answer.status_code == 503:
                    return found

    with server(*serve, folder=tmp_path) as (process, url), ThreadPoolExecutor(12) as pool:
        sent = {"files": {"file": ("in.jsonl", rows.encode())}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{url}/v1/files", timeout=60, **sent).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/embeddings"}
        identities = [post(url, "/v1/batches", body).json()["id"] for _ in range(3)]
        until(lambda: all(batch(url, one)["request_counts"]["completed"] > 0 for one in identities))
        callers = [pool.submit(call, url) for _ in range(12)]
        until(lambda: metric(url, "headrace_accepted_records") >= 12)
        stopping.set()
        process.send_signal(signal.SIGTERM)
        answers = [answer for caller in callers for answer in caller.result()]
        assert process.wait(60) == 0
        assert {status for status, _ in answers} <= {200, 503}
        assert all(good for _, good in answers)
    with server(*serve, folder=tmp_path) as (_, url):
        for identity in identities:
            until(lambda identity=identity: batch(url, identity)["status"] == "completed")  # type: ignore[misc]
            output = httpx.get(f"{url}/v1/files/{batch(url, identity)['output_file_id']}/content", timeout=60).text
            assert sorted(int(json.loads(line)["custom_id"]) for line in output.splitlines()) == [*range(count)]


def batch(url: str, identity: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/batches/{identity}", timeout=60).json())
