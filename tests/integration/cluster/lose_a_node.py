"""A job on a cluster of two nodes beside its head, one of which is lost in the middle. Run by test_nodes.py."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from headrace.cluster.ray_job import execute
from headrace.cluster.ray_workers import Place
from headrace.jobs.job import StopRequest
from headrace.jobs.settings import JobSettings

MEMORY = 80 * 1024 * 1024


def main(folder: Path) -> None:
    """Run the job in `folder`, and print how it went."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    )
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=MEMORY) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def lose_one() -> None:
        while len(list((folder / "out.jsonl.parts").glob("*"))) < 4:
            time.sleep(0.02)
        cluster.remove_node(nodes[0], allow_graceful=False)

    threading.Thread(target=lose_one, daemon=True).start()
    settings = JobSettings(
        source=folder / "in.jsonl",
        sink=folder / "out.jsonl",
        task="custom",
        engine="tests.integration.cluster.engines:journal",
        model=str(folder / "journals"),
    )
    end, report = execute(settings, Place(replicas=2, cpus=2), StopRequest(), progress=False)
    said = {"state": end.state, "records": end.records, "lost": sum(lane.lost for lane in report.lanes)}
    sys.stdout.write(json.dumps(said) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
