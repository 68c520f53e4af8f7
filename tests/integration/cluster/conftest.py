"""One small Ray cluster on this machine for all tests here."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A time limit is for what hangs: where the cores are busy, Ray alone takes half a minute to start."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster that this process is connected to."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers look for modules where the environment says, not where pytest has been told to look.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    for counted_by in ("REPLICA", "HANDLE"):  # how often Ray Serve hears how many requests there are
        os.environ[f"RAY_SERVE_{counted_by}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
    ray = pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Serve's own, of what it uses in an old way
        importlib.import_module("ray.serve")
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=4,  # of which none is really taken
        object_store_memory=80 * 1024 * 1024,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes an input of so many rows."""

    def write(count: int, **special: Any) -> Path:
        path = tmp_path / "in.jsonl"
        texts = (special.get(f"row{n}", f"text number {n}" + " more" * (n % 7)) for n in range(count))
        path.write_text("".join(json.dumps({"id": f"r{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
        return path

    return write


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six seconds without an answer, rather than half a minute; on busy cores a good worker may take some of them."""
    monkeypatch.setattr("headrace.cluster.heartbeat.PULSE_S", 0.5)
    monkeypatch.setattr("headrace.cluster.heartbeat.MISSED", 12)
    monkeypatch.setattr("headrace.cluster.heartbeat.MISSED_LOADING", 12)
