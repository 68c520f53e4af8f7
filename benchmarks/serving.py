"""The server under load: the cost of a request, other servers, overload, callers, and bulk work beside requests.

    python -m benchmarks.serving [--quick] [overhead | routes | embedding | choice | overload | callers | bodies |
        backfill]

Each server and the load generator run in separate processes, on loopback. Other batching servers take part after
`scripts/install-peers`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import quick, ratio, report, rounds
from benchmarks.cpu import cpu_s
from benchmarks.serving_apps import BASE_S, UNIT_S
from examples.docstrings import collect
from headrace.engines.model_folder import find_folder

PATH = "/v1/embeddings"
BODY = json.dumps({"input": "a short text"})
JSON = {"content-type": "application/json"}
FULL = 32
CAPACITY = FULL / (BASE_S + UNIT_S * FULL)
"""Records a second that the timed engine can do: full batches without a gap."""
CALLERS = 64
FIXED = [("float32", 1_024), ("bfloat16", 1_024), ("bfloat16", 4_096), ("bfloat16", 16_384)]
"""Numbers and budgets that a server is compared with."""
PEERS = Path(os.environ.get("PEERS_PYTHON", ".venv-peers/bin/python"))
PEER_NAMES = {"mosec": "mosec", "litserve": "litserve", "bentoml": "bentoml", "ray": "ray", "infinity": "infinity_emb"}


class NotUpError(Exception):
    """A server cannot be measured."""


@contextlib.contextmanager
def running(command: list[str], url: str, body: str, **environment: str) -> Iterator[int]:
    """Serve while the body runs, once a request with `body` is answered; the process's id."""
    quiet = None if command[0] == sys.executable else subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        _wait(process, url, body)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):  # its workers too, if they are still there
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def serving(name: str, *arguments: str, path: str = PATH, body: str = BODY) -> Iterator[tuple[int, int]]:
    """One of `serving_apps`, up once it answers `body`; its port and the process's id."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.serving_apps", name, str(port), *arguments]
    with running(command, f"http://127.0.0.1:{port}{path}", body) as pid:
        yield port, pid


@contextlib.contextmanager
def peer(name: str, model: str, body: str) -> Iterator[int]:
    """One of the other servers; its port."""
    port = _free_port()
    command = [str(PEERS), "-m", "benchmarks.peers", name, str(port)]
    with running(command, f"http://127.0.0.1:{port}{PATH}", body, MODEL=model):
        yield port


def peers(*names: str) -> dict[str, str]:
    """Those of them that are installed, with their versions."""
    if not PEERS.exists():
        print(f"no other servers: {PEERS} is not there (scripts/install-peers makes it)", file=sys.stderr)
        return {}
    code = "import sys; from importlib.metadata import version; print(*(version(name) for name in sys.argv[1:]))"
    command = [str(PEERS), "-c", code, *(PEER_NAMES[name] for name in names)]
    versions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {name: f"{name} {version}" for name, version in zip(names, versions, strict=True)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, body: str) -> None:
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.post(url, content=body, headers=JSON, timeout=30).is_success:
                return
        time.sleep(0.2)
    raise NotUpError(f"the server does not answer: {process.args!r}")


def load(port: int, callers: int, seconds: float, *, rate: float | None = None, body: str = BODY) -> dict[str, Any]:
    """What the load generator says."""
    command = [sys.executable, "-m", "benchmarks.serving_load", str(port), PATH, str(callers), str(seconds), body]
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


def compared(
    names: tuple[str, ...], own: Mapping[str, str], model: str, seconds: float, bodies: Callable[[str], str]
) -> dict[str, tuple[list[float], float]]:
    """Answers per second and median p99: of our servers three times in turn, then of each other server, alone, once."""
    late: dict[str, list[float]] = {}

    def measured(title: str, port: int, body: str) -> float:
        result = load(port, CALLERS, seconds, body=body)
        late.setdefault(title, []).append(p99(result))
        print(f"{title}: {per_s(result):.1f} a second", file=sys.stderr, flush=True)
        return per_s(result)

    with contextlib.ExitStack() as up:
        variants: dict[str, Callable[[], float]] = {}
        for title, app in own.items():
            port, _ = up.enter_context(serving(*app.split()))
            load(port, CALLERS, 2, body=bodies("headrace"))
            variants[title] = partial(measured, title, port, bodies("headrace"))
        figures = rounds(1 if quick() else 3, variants)
    for name, title in peers(*names).items():
        try:
            with peer(name, model, _ready(bodies(name))) as port:
                load(port, CALLERS, 2, body=bodies(name))
                figures[title] = [measured(title, port, bodies(name))]
        except NotUpError as error:
            print(error, file=sys.stderr, flush=True)
    return {title: (found, statistics.median(late[title])) for title, found in figures.items()}


def _ready(body: str) -> str:
    """A body that shows whether a server is up."""
    return Path(body[1:]).read_text().splitlines()[0] if body.startswith("@") else body


def _as(name: str, text: str) -> str:
    """A text as a request: BentoML batches along lists."""
    return json.dumps({"input": [text] if name == "bentoml" else text})


def overhead() -> None:
    """A no-op engine against a bare route and other servers."""
    bare = "bare FastAPI route"
    found = compared(
        ("mosec", "litserve", "bentoml", "ray"),
        {bare: "bare", "Headrace": "noop"},
        "noop",
        1.0 if quick() else 4.0,
        partial(_as, text="a short text"),
    )
    base = statistics.median(found[bare][0])
    rows = [
        [title, statistics.median(per), statistics.median(per) / base, late] for title, (per, late) in found.items()
    ]
    title = f"A no-op engine, {CALLERS} callers, one record per request"
    report("serving_overhead", title, ("server", "requests/s", "x bare route", "p99, ms"), rows)


def embedding() -> None:
    """Texts of mixed length to vectors, on a CPU."""
    found = _docstrings(("litserve", "bentoml", "infinity"), {"Headrace": "embed"})
    ours = statistics.median(found["Headrace"][0])
    rows = [
        [title, statistics.median(per), ours / statistics.median(per), late] for title, (per, late) in found.items()
    ]
    title = f"all-MiniLM-L6-v2 on a CPU, {CALLERS} callers, docstrings of mixed length, one per request"
    report("serving_embedding", title, ("server", "texts/s", "Headrace is x as fast", "p99, ms"), rows)


def choice() -> None:
    """What a server chooses by itself against fixed settings."""
    ours = "as it comes"
    fixed = {f"{dtype}, {tokens:,} tokens": f"embed {dtype} {tokens}" for dtype, tokens in FIXED}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # as on a machine where nothing was found before
        found = _docstrings((), {ours: "embed", **fixed})
    rows = [[title, statistics.median(per), ratio(found[ours][0], per), late] for title, (per, late) in found.items()]
    title = f"What a server chooses, all-MiniLM-L6-v2 on a CPU, {CALLERS} callers, docstrings, one per request"
    report("serving_choice", title, ("setting", "texts/s", "as it comes is x as fast", "p99, ms"), rows)


def _docstrings(names: tuple[str, ...], own: Mapping[str, str]) -> dict[str, tuple[list[float], float]]:
    docstrings = list(collect().values())
    texts = docstrings[:: len(docstrings) // 600][:600]
    with tempfile.TemporaryDirectory() as folder:

        def bodies(name: str) -> str:
            file = Path(folder) / name
            file.write_text("\n".join(_as(name, text) for text in texts))
            return f"@{file}"

        return compared(names, own, str(find_folder(None)), 2.0 if quick() else 10.0, bodies)


def routes() -> None:
    """Other ways from a connection to a route, each with all that comes before and after."""
    ways = {
        "Headrace: called by the middleware": "noop",
        "a timer for every body": "timeout",
        "same route, through Starlette's router": "routed",
        "FastAPI's own route": "fastapi",
        "plain Starlette app, no keys, limits or counters": "starlette",
    }
    spent: dict[str, list[float]] = {title: [] for title in ways}

    def measured(title: str, port: int, pid: int) -> float:
        before = cpu_s(pid)
        result = load(port, CALLERS, 1.0 if quick() else 4.0)
        spent[title].append((cpu_s(pid) - before) / len(result["latencies_ms"]) * 1e6)
        return per_s(result)

    with contextlib.ExitStack() as up:
        variants: dict[str, Callable[[], float]] = {}
        for title, app in ways.items():
            port, pid = up.enter_context(serving(app))
            load(port, CALLERS, 2)
            variants[title] = partial(measured, title, port, pid)
        figures = rounds(2 if quick() else 7, variants)
    ours = figures[next(iter(ways))]
    rows = [[t, statistics.median(per), ratio(per, ours), statistics.median(spent[t])] for t, per in figures.items()]
    columns = ("way to the route", "requests/s", "x Headrace", "server's CPU, µs a request")
    report("serving_routes", f"Ways to a route: a no-op engine, {CALLERS} callers", columns, rows)


def overload() -> None:
    """Three times what the engine can do."""
    seconds = 5.0 if quick() else 60.0
    target_ms = 2.5 * FULL / CAPACITY * 1000
    with serving("timed") as (port, pid):
        load(port, 2 * FULL, 2)
        capacity = per_s(load(port, 2 * FULL, seconds / 6))
        load(port, 0, 2, rate=3 * capacity)
        before = memory_mb(pid)
        result = load(port, 0, seconds, rate=3 * capacity)
        after = memory_mb(pid)
    refused = result["statuses"].get("429", 0)
    rows = [[capacity, per_s(result), per_s(result) / capacity, p99(result), target_ms, refused, after - before]]
    columns = (
        "capacity, answers/s",
        "answers/s",
        "of capacity",
        "p99 of answers, ms",
        "target, ms",
        "refused with 429",
        "memory grown, MB",
    )
    note = (
        f"The engine waits {BASE_S * 1000:.0f} ms a batch and {UNIT_S * 1000:.2f} ms a record, {FULL} at most: "
        f"{CAPACITY:.0f} a second without any gap. Capacity is what {2 * FULL} callers get who ask again after each "
        f"answer. {2 * FULL} records are accepted at most; the target is two and a half full batches."
    )
    report("serving_overload", f"{seconds:.0f} s at 3 x capacity", columns, rows, [note])


def called(port: int, *arguments: str) -> dict[str, Any]:
    """What `serving_callers` says."""
    command = [sys.executable, "-m", "benchmarks.serving_callers", str(port), *arguments]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def called_together(port: int, *groups: str) -> dict[str, Any]:
    """What `serving_callers` says of groups that begin at once, each in a process of its own: a client that reads
    500 vectors must not hold up another's clock."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_callers", str(port), group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for group in groups
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found: dict[str, Any] = {}
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
    for process in processes:
        found |= json.loads(process.communicate()[0])
    return found


GROUPS = ("8x100x300", "4x1000x30", "40x500x30")


def callers() -> None:
    """Ordinary batches of OpenAI's client, single texts beside them, and more than the server allows."""
    groups = [group.replace("00x", "x") for group in GROUPS] if quick() else GROUPS
    rows: list[list[Any]] = []

    def p99_ms(port: int, *beside: str) -> tuple[float, dict[str, Any]]:
        found = called_together(port, *beside, "singles")
        latencies = found["singles"]["latencies_s"]
        return (1000 * latencies[int(len(latencies) * 0.99)] if latencies else float("nan")), found

    with serving("embed") as (port, pid):
        alone = [p99_ms(port)[0]]
        for state in ("fresh", "warm"):
            for group in groups:
                # Each on a fresh server of its own, and then all on one.
                with serving("embed") if state == "fresh" else contextlib.nullcontext((port, pid)) as (own, _):
                    began = time.monotonic()
                    late_ms, found = p99_ms(own, group)
                    spent = time.monotonic() - began
                    alone.append(p99_ms(own)[0])
                lost = sum(sum(one["lost"].values()) for one in found.values())
                rows.append([f"{group}, {state}", found[group]["answered"], lost, spent, late_ms])
        beyond = called(port, "obey", "6" if quick() else "150")
    columns = ("callers x texts x words", "answered", "lost", "s", "p99 of single texts, ms", "x alone")
    alone_ms = statistics.median(alone)
    rows = [[*row, row[-1] / alone_ms] for row in rows]
    note = (
        f"Beside them 200 single texts, 50 a second: alone, their p99 is {alone_ms:.0f} ms (median of {len(alone)}, "
        f"each before or after a row; {min(alone):.0f} to {max(alone):.0f}). Of 40 requests with 150 s "
        f"of work together, {beyond['refused']} were refused, of which {beyond['second']} were answered at their "
        "second attempt, when Retry-After had told them to come back."
    )
    report("serving_callers", "OpenAI's client at its defaults", columns, rows, [note])


def bodies() -> None:
    """Bodies of the largest size at once, and idle connections."""
    rows: list[list[Any]] = []
    count, size = (20, 1_000_000) if quick() else (200, 33_000_000)
    with serving("embed") as (port, pid):
        before = memory_mb(pid)
        sent = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_callers", str(port), "bodies", str(count), str(size)],
            stdout=subprocess.PIPE,
            text=True,
        )
        most = before
        while sent.poll() is None:
            most = max(most, memory_mb(pid))
            time.sleep(0.05)
        assert sent.stdout is not None
        statuses = json.loads(sent.stdout.read())["statuses"]
        rows.append(
            [
                f"{count} bodies of {size:,} bytes",
                statuses.get("200", 0),
                statuses.get("429", 0),
                statuses.get("408", 0),
                sum(statuses.values()) - sum(statuses.get(status, 0) for status in ("200", "429", "408")),
                most - before,
            ]
        )
        lost = sum(sum(called(port, "idle", "50" if quick() else "500", "5.05")["lost"].values()) for _ in range(3))
    columns = ("at once", "answered", "refused with 429", "too slow: 408", "lost", "memory grown at most, MB")
    note = f"500 connections of httpx, idle for 4.8 to 5.05 s, three times: {lost} requests lost."
    report("serving_bodies", "The largest bodies, and idle connections", columns, rows, [note])


def _upload(port: int, records: int) -> None:
    lines = (
        json.dumps({"custom_id": str(n), "method": "POST", "url": PATH, "body": {"input": f"text {n}"}})
        for n in range(records)
    )
    base = f"http://127.0.0.1:{port}/v1"
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    file = httpx.post(f"{base}/files", files=files, data={"purpose": "batch"}, timeout=60).json()
    httpx.post(f"{base}/batches", json={"input_file_id": file["id"], "endpoint": PATH}).raise_for_status()


def metric(port: int, name: str) -> float:
    """What `/metrics` says, all labels together."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def _beside(target_ms: float, seconds: float, *, bulk: bool) -> list[Any]:
    """Requests at 30 % of capacity, with or without bulk work without end beside them."""
    rate = 0.3 * CAPACITY
    with tempfile.TemporaryDirectory() as folder, serving("mixed", folder, str(target_ms)) as (port, _):
        if bulk:
            _upload(port, int(CAPACITY * (seconds + 30)))
            load(port, 0, 8.0, rate=rate)  # until it is learned how long batches take, and what delays requests
        names = ("headrace_records_total", "headrace_batch_duration_seconds_sum")
        done, busy = (metric(port, name) for name in names)
        began = time.monotonic()
        result = load(port, 0, seconds, rate=rate)
        spent = time.monotonic() - began
        done, busy = (metric(port, name) - before for name, before in zip(names, (done, busy), strict=True))
    share = (done - len(result["latencies_ms"])) / spent / CAPACITY
    return [p99(result), per_s(result) / CAPACITY, share, busy / spent]


def backfill() -> None:
    """What bulk work gets, by what requests are promised."""
    seconds = 4.0 if quick() else 30.0
    alone = _beside(0, seconds, bulk=False)
    rows = [["no bulk work", *alone]]
    for factor in (1.5,) if quick() else (1.0, 1.5, 2.0, 3.0):
        target = factor * alone[0]
        rows.append([f"{target:.0f} ms ({factor:g} x)", *_beside(target, seconds, bulk=True)])
    rows.append(["none", *_beside(0, seconds, bulk=True)])
    columns = ("latency target", "online p99, ms", "online, of capacity", "bulk, of capacity", "engine busy")
    note = (
        f"The engine waits {BASE_S * 1000:.0f} ms a batch and {UNIT_S * 1000:.2f} ms a record, {FULL} at most. "
        "A request that comes just after a batch has begun waits for that one and its own: within a target, no batch "
        "may take longer than half of it."
    )
    report("serving_backfill", "Requests at 30 % of capacity, bulk work without end", columns, rows, [note])


def main() -> None:
    """Those that are named, or all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    known = {
        "overhead": overhead,
        "routes": routes,
        "embedding": embedding,
        "choice": choice,
        "overload": overload,
        "callers": callers,
        "bodies": bodies,
        "backfill": backfill,
    }
    for name in [name for name in sys.argv[1:] if name in known] or known:
        known[name]()


if __name__ == "__main__":
    main()
