"""A cluster on this machine: one worker and this process, two workers and one, Ray Data; replicas that scale.

And worker processes without a cluster.

python -m benchmarks.cluster            # all; --quick for a short run; or name one: bulk, cores, scaling
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray

from benchmarks.common import quick, ratio, report, rounds, version
from headrace.app.jobs import job as jobs
from headrace.app.servers.server import ServerSettings
from headrace.cluster import local_workers
from headrace.cluster.base import ClusterResources, Replicas
from headrace.cluster.ray.serving import NAME, served
from headrace.cluster.ray.workers import execute
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings

BATCH = 64
BATCH_S = 0.025
RECORDS = 8_000 if quick() else 40_000
ROUNDS = 1 if quick() else 2
PORT = 8033


def waits(texts: list[str]) -> list[float]:
    """Takes as long as a GPU would, and as little of the processor; says when it was done."""
    time.sleep(BATCH_S)
    return [time.monotonic()] * len(texts)


class Waits:
    """The same for Ray Data."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of columns."""
        return {"id": batch["id"], "output": waits(list(batch["text"]))}


def span(ends: list[float]) -> float:
    """Records per second, from the beginning of the first batch to the end of the last."""
    return len(ends) / (max(ends) - min(ends) + BATCH_S)


class Bulk:
    """The ways to take one input through the engine; each gives records per second while the engine runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._input = folder / "in.jsonl"
        self._input.write_text(
            "".join(
                json.dumps({"id": f"r{n}", "text": f"text {n} " + "word " * (n % 40)}) + "\n" for n in range(RECORDS)
            )
        )
        self.walls: dict[str, list[float]] = {}

    def timed(self, name: str, way: Callable[[Path], None]) -> float:
        """Run it into an output of its own."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            started = time.monotonic()
            way(Path(place))
            self.walls.setdefault(name, []).append(time.monotonic() - started)
            files = [file for file in Path(place).glob("*.json*") if file.is_file()]
            rows = [json.loads(line) for file in files for line in file.open()]
        ends = [row["output"] for row in rows if "output" in row]
        if len(ends) != RECORDS:
            raise SystemExit(f"{name}: {len(ends)} of {RECORDS} records came back")
        return span(ends)

    def settings(self, place: Path) -> JobSettings:
        """The job."""
        options = {"batch_size": BATCH}
        sink = place / "out.jsonl"
        return JobSettings(
            source=self._input,
            sink=sink,
            config=EngineConfig(task="custom", engine="benchmarks.cluster:waits", engine_options=options),
        )

    def here(self, place: Path) -> None:
        """`headrace run`."""
        jobs.execute(self.settings(place), StopRequest(), progress=False)

    def on_ray(self, replicas: int) -> Callable[[Path], None]:
        """`headrace run --on ray`."""
        return lambda place: void(
            execute(self.settings(place), ClusterResources(replicas=replicas, cpus=0.5), StopRequest(), progress=False)
        )

    def on_processes(self, size: int) -> Callable[[Path], None]:
        """`headrace run --data-parallel-size`."""
        return lambda place: void(local_workers.execute(self.settings(place), size, StopRequest(), progress=False))

    def ray_data(self, place: Path) -> None:
        """What Ray Data's users write."""
        from ray.data import ActorPoolStrategy, DataContext, read_json

        DataContext.get_current().enable_progress_bars = False
        pool = ActorPoolStrategy(size=2)
        found = read_json(str(self._input), lines=True, override_num_blocks=32)
        found.map_batches(Waits, batch_size=BATCH, compute=pool, num_cpus=0.5).write_json(str(place))


def void(_: object) -> None:
    """Drop it."""


def bulk() -> None:
    """One table: records per second, and what two workers and a cluster make of it."""
    with tempfile.TemporaryDirectory() as folder:
        ways = Bulk(Path(folder))
        variants: dict[str, Callable[[Path], None]] = {
            "headrace run": ways.here,
            "headrace run --data-parallel-size 1": ways.on_processes(1),
            "headrace run --data-parallel-size 2": ways.on_processes(2),
            "headrace run --on ray, 1 worker": ways.on_ray(1),
            "headrace run --on ray, 2 workers": ways.on_ray(2),
            "Ray Data map_batches, 2 actors": ways.ray_data,
        }
        figures = rounds(ROUNDS, {name: lambda n=name, w=way: ways.timed(n, w) for name, way in variants.items()})  # type: ignore[misc]
    here, single, double, one, two, data = figures.values()
    rows = [
        [name, round(statistics.median(speeds)), statistics.median(ways.walls[name])]
        for name, speeds in figures.items()
    ]
    report(
        "cluster-bulk",
        f"Bulk on a cluster of one machine: {RECORDS:,} records, batches of {BATCH} in {BATCH_S * 1000:.0f} ms",
        ["way", "records/s while it runs", "wall with start-up, s"],
        rows,
        [
            f"Two workers over one: {ratio(two, one):.2f} x (to reach: 1.8).",
            f"Two worker processes over one: {ratio(double, single):.2f} x (to reach: 1.8).",
            f"What a cluster costs one worker, beside this process: {ratio(here, one) - 1:.1%} (to reach: 5 %).",
            f"Two workers over Ray Data's two actors: {ratio(two, data):.2f} x (to reach: 1).",
            f"The engine's own bound is {BATCH / BATCH_S:,.0f} records/s for each worker. {version('ray')}.",
        ],
    )


def cores() -> None:
    """One worker on one core, two workers on a core each: the model computes."""
    mine = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        texts = (f"text {n} " + "word " * (n * 7 % 90) for n in range(RECORDS // 8))
        source.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
        walls = rounds(ROUNDS, {size: lambda s=size: embedded(source, s, mine[:s]) for size in (1, len(mine))})  # type: ignore[misc]
    os.sched_setaffinity(0, mine)
    one, two = walls.values()
    report(
        "cluster-cores",
        f"Worker processes of one machine: {RECORDS // 8:,} texts of mixed length, all-MiniLM-L6-v2, a core each",
        ["workers", "records/s while they run"],
        [[size, round(statistics.median(speeds))] for size, speeds in walls.items()],
        [f"{len(mine)} workers over one: {ratio(two, one):.2f} x (to reach: 1.8)."],
    )


def embedded(source: Path, size: int, allowed: list[int]) -> float:
    """Records per second of the workers' engines, from the first batch to the last."""
    os.sched_setaffinity(0, allowed)
    with tempfile.TemporaryDirectory() as place:
        config = EngineConfig(task="embed", engine_options={"dtype": "float32"})
        settings = JobSettings(source=source, sink=Path(place) / "out.parquet", config=config)
        _, found = local_workers.execute(settings, size, StopRequest(), progress=False)
    return found.ok / found.wall_s


def running() -> int:
    """Replicas that answer."""
    from ray import serve

    states = serve.status().applications[NAME].deployments[NAME].replica_states
    return int({str(state): number for state, number in states.items()}.get("RUNNING", 0))


def until(replicas: int) -> float:
    """Seconds until there are so many."""
    started = time.monotonic()
    while running() != replicas:
        if time.monotonic() - started > 120:
            raise SystemExit(f"{running()} replicas after two minutes, not {replicas}")
        time.sleep(0.2)
    return time.monotonic() - started


def scaling() -> None:
    """One table: from none to two replicas and back."""
    options = {"seconds_per_batch": 0.2}
    settings = ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine", engine_options=options))
    scale = Replicas(0, 2, target_ongoing_requests=2.0, scaledown_after_s=5.0, scaleup_after_s=1.0)
    statuses: Counter[int] = Counter()
    enough = threading.Event()
    with served(settings, scale, ClusterResources(cpus=0.5), "127.0.0.1", PORT) as url:
        until(0)
        started = time.monotonic()
        httpx.post(f"{url}/v1/embeddings", json={"input": "a text"}, timeout=120).raise_for_status()
        cold = time.monotonic() - started

        async def ask() -> None:
            async with httpx.AsyncClient(timeout=120) as client:
                while not enough.is_set():
                    reply = await client.post(f"{url}/v1/embeddings", json={"input": "a text"})
                    statuses[reply.status_code] += 1

        async def crowd() -> None:
            await asyncio.gather(*(ask() for _ in range(12)))

        load = threading.Thread(target=asyncio.run, args=(crowd(),))
        load.start()
        up = until(2)
        time.sleep(3)
        enough.set()
        load.join()
        down = until(0)
    answered = statuses[200]
    rows = [
        ["first answer from no replica", cold],
        ["two replicas under 12 callers", up],
        ["no replica after the last request (5 s, after a mean over 30 s)", down],
    ]
    lost = statuses.total() - answered
    report(
        "cluster-scaling",
        "Replicas on Ray Serve: 0 -> 2 -> 0",
        ["what", "seconds"],
        rows,
        [f"{answered:,} requests answered, {lost} not. {version('ray')}."],
    )


def main() -> None:
    """What was named, or all."""
    named = [name for name in sys.argv[1:] if not name.startswith("-")] or ["bulk", "cores", "scaling"]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for counted_by in ("REPLICA", "HANDLE"):  # how often Ray Serve hears how many requests there are
        os.environ[f"RAY_SERVE_{counted_by}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=4,
        object_store_memory=200 * 1024 * 1024,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        for name in named:
            {"bulk": bulk, "cores": cores, "scaling": scaling}[name]()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
