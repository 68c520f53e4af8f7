"""The server under load: overhead of a request, overload, and bulk work beside requests.

    python -m benchmarks.serving [--quick] [overhead | overload | backfill]

Each server and the load are processes of their own, on loopback.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import quick, ratio, report, rounds

PATH = "/v1/embeddings"
BODY = json.dumps({"input": "a short text"})
CAPACITY = 32 / 0.042
"""Records a second that the timed engine can do: full batches without a gap."""


@contextlib.contextmanager
def serving(name: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Serve while the body runs; the port and the process's id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.serving_apps", name, str(port), *arguments])
    try:
        _wait(port)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(port: int) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            if httpx.post(f"http://127.0.0.1:{port}{PATH}", content=BODY, headers=JSON).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")


JSON = {"content-type": "application/json"}


def load(port: int, callers: int, seconds: float, rate: float | None = None) -> dict[str, Any]:
    """What the load generator says."""
    command = [sys.executable, "-m", "benchmarks.serving_load", str(port), PATH, str(callers), str(seconds), BODY]
    if rate is not None:
        command.append(str(rate))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def per_s(result: dict[str, Any]) -> float:
    """Answers with status 200 per second."""
    return float(len(result["latencies_ms"]) / result["seconds"])


def p99(result: dict[str, Any]) -> float:
    """In milliseconds."""
    latencies = result["latencies_ms"]
    return float(latencies[min(int(len(latencies) * 0.99), len(latencies) - 1)]) if latencies else float("nan")


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def overhead() -> None:
    """A no-op engine against a bare route."""
    seconds, count = (1.0, 1) if quick() else (4.0, 5)
    with serving("bare") as (bare, _), serving("noop") as (ours, _):
        for port in (bare, ours):
            load(port, 64, 1)
        figures = rounds(
            count,
            {
                "bare FastAPI": lambda: per_s(load(bare, 64, seconds)),
                "Headrace": lambda: per_s(load(ours, 64, seconds)),
            },
        )
    rows = [[name, max(found), ratio(found, figures["bare FastAPI"])] for name, found in figures.items()]
    report(
        "serving_overhead",
        "A no-op engine, 64 callers, one record per request",
        ("server", "requests/s, best", "ratio"),
        rows,
    )


def overload() -> None:
    """Three times what the engine can do."""
    seconds = 5.0 if quick() else 60.0
    with serving("timed") as (port, pid):
        load(port, 32, 2)
        before = memory_mb(pid)
        result = load(port, 0, seconds, rate=3 * CAPACITY)
        after = memory_mb(pid)
    refused = result["statuses"].get("429", 0)
    row = [per_s(result), per_s(result) / CAPACITY, p99(result), refused, after - before]
    columns = ("answers/s", "of capacity", "p99 of answers, ms", "refused with 429", "memory grown, MB")
    report("serving_overload", f"{seconds:.0f} s at 3 x capacity, 64 records accepted at most", columns, [row])


def _upload(port: int, records: int) -> None:
    lines = (
        json.dumps({"custom_id": str(n), "method": "POST", "url": PATH, "body": {"input": f"text {n}"}})
        for n in range(records)
    )
    base = f"http://127.0.0.1:{port}/v1"
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    file = httpx.post(f"{base}/files", files=files, data={"purpose": "batch"}, timeout=60).json()
    httpx.post(f"{base}/batches", json={"input_file_id": file["id"], "endpoint": PATH}).raise_for_status()


def _metric(port: int, name: str) -> float:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def _beside(target_ms: float, seconds: float, *, bulk: bool) -> list[Any]:
    """Requests at 30 % of capacity, with or without bulk work without end beside them."""
    rate = 0.3 * CAPACITY
    with tempfile.TemporaryDirectory() as folder, serving("mixed", folder, str(target_ms)) as (port, _):
        if bulk:
            _upload(port, int(CAPACITY * (seconds + 15)))
            time.sleep(3)
        names = ("headrace_records_total", "headrace_batch_seconds_sum")
        done, busy = (_metric(port, name) for name in names)
        began = time.monotonic()
        result = load(port, 0, seconds, rate=rate)
        spent = time.monotonic() - began
        done, busy = (_metric(port, name) - before for name, before in zip(names, (done, busy), strict=True))
    share = (done - len(result["latencies_ms"])) / spent / CAPACITY
    return [p99(result), per_s(result) / CAPACITY, share, busy / spent]


def backfill() -> None:
    """What bulk work gets, by what requests are promised."""
    seconds = 4.0 if quick() else 20.0
    alone = _beside(0, seconds, bulk=False)
    rows = [["no bulk work", *alone]]
    for factor in (1.5,) if quick() else (1.0, 1.5, 2.0, 3.0):
        target = factor * alone[0]
        rows.append([f"{target:.0f} ms ({factor:g} x)", *_beside(target, seconds, bulk=True)])
    rows.append(["none", *_beside(0, seconds, bulk=True)])
    columns = ("latency target", "online p99, ms", "online, of capacity", "bulk, of capacity", "engine busy")
    report("serving_backfill", "Requests at 30 % of capacity, bulk work without end", columns, rows)


def main() -> None:
    """Those that are named, or all."""
    known = {"overhead": overhead, "overload": overload, "backfill": backfill}
    for name in [name for name in sys.argv[1:] if name in known] or known:
        known[name]()


if __name__ == "__main__":
    main()
