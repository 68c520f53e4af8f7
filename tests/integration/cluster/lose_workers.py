"""A job on two nodes beside a head: a worker's process, an actor and a whole node are lost. Run by test_losses.py."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from tests.waiting import until

from headrace.cluster.base import ClusterResources
from headrace.cluster.ray import workers as ray_job
from headrace.cluster.ray.workers import RayWorkers
from headrace.engines.choosing.config import EngineConfig
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import JobSettings

MEMORY = 80 * 1024 * 1024
SOURCE, SINK, JOURNALS = "in.jsonl", "out.jsonl", "journals"
pools: list[RayWorkers] = []


class WatchedWorkers(RayWorkers):
    """Registers itself, so that the test can kill its workers."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        pools.append(self)


def lose(folder: Path, cluster: Cluster, node: Any, records: int) -> None:
    """One loss after the other, each once there has been some progress since the one before."""

    def progress(share: float) -> None:
        journals = folder / JOURNALS
        until(
            lambda: sum(file.read_bytes().count(b"\n") for file in journals.glob("*.txt")) >= share * records, math.inf
        )

    progress(0.15)
    one, other, *_ = pools[0].initial
    os.kill(int(ray.get(one.greeting).rpartition(" ")[2]), signal.SIGKILL)
    progress(0.35)
    ray.kill(other._actor)
    progress(0.55)
    cluster.remove_node(node, allow_graceful=False)


def main(folder: Path) -> None:
    """Run the job in `folder`, and print how it went."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    )
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=MEMORY) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with (folder / SOURCE).open("rb") as lines:
        records = sum(1 for _ in lines)
    threading.Thread(target=lose, args=(folder, cluster, nodes[0], records), daemon=True).start()
    settings = JobSettings(
        source=folder / SOURCE,
        sink=folder / SINK,
        config=EngineConfig(
            task="custom", engine="tests.integration.cluster.engines:journal", model=str(folder / JOURNALS)
        ),
    )
    ray_job.RayWorkers = WatchedWorkers  # type: ignore[assignment,misc]
    end, report = ray_job.execute(settings, ClusterResources(replicas=3, cpus=1), StopRequest(), progress=False)
    lost = sum(lane.lost for lane in report.lanes)
    sys.stdout.write(json.dumps({"state": end.state, "records": end.records, "ok": report.ok, "lost": lost}) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
