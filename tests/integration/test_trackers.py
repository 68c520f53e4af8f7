"""Experiment trackers, with their real libraries: MLflow on a local SQLite file, Weights & Biases offline."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from mlflow.entities import Run
from tests.waiting import until
from wandb.proto.wandb_internal_pb2 import Record

import headrace
from headrace.observe.exporters.tracking import Ended, Tracker, TrackingListener, key

HOSTILE = "</script>{{7*7}}"


def job(folder: Path, name: str, *listeners: Any) -> Any:
    texts = ["a text"] * 60 + ["", None]
    return headrace.run(
        texts, sink=folder / f"{name}.jsonl", task="embed", engine="headrace.testing:FakeEngine",
        engine_options={"seconds_per_batch": 0.05}, batch_size=8, progress=False, listeners=listeners,
    )  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def store(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(database)
    mlflow.set_tracking_uri(f"sqlite:///{database}/mlflow.db")


def newest_run() -> Run:
    return mlflow.MlflowClient().search_runs(["0"])[0]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_gets_settings_figures_and_the_page(store: None, tmp_path: Path) -> None:
    report = job(tmp_path, HOSTILE.replace("/", "-"), headrace.MLflowListener(every_s=0.05))
    run = newest_run()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == str(tmp_path / f"{HOSTILE.replace('/', '-')}.jsonl")
    assert run.data.params["engine"] == "headrace.testing:FakeEngine"
    assert run.data.params["version of headrace"] == headrace.__version__
    assert run.data.metrics["total/records"] == report.ok == 61
    assert run.data.metrics["total/failed"] == report.failed == 1
    assert run.data.metrics["memory/process_bytes"] > 0
    assert {"device/busy", "device/real", "total/batches"} <= run.data.metrics.keys()
    page = Path(mlflow.MlflowClient().download_artifacts(run.info.run_id, "report.html")).read_text()
    assert "Where every second went" in page
    assert "</script>{{7*7}}" not in page


@pytest.mark.filterwarnings("ignore")
def test_an_active_run_is_joined_and_stays_open(store: None, tmp_path: Path) -> None:
    with mlflow.start_run() as mine:
        tracked = headrace.MLflowListener()
        job(tmp_path, "one", tracked)
        job(tmp_path, "two", tracked)
        assert mlflow.active_run() is not None
    assert newest_run().info.run_id == mine.info.run_id
    assert len(mlflow.MlflowClient().get_metric_history(mine.info.run_id, "total/records")) >= 2


def test_weights_and_biases_gets_the_same_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    job(tmp_path, "out", headrace.WandbListener(every_s=0.05))
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    until(lambda: any(one.HasField("exit") for one in records_of(file)))
    records = records_of(file)
    sums = {}
    for record in records:
        for item in record.history.item:
            sums[item.key or "/".join(item.nested_key)] = item.value_json
    assert float(sums["headrace/total/records"]) == 61
    assert any(entry.path == "report.html" for record in records for entry in record.artifact.manifest.contents)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert wandb.run is None


def records_of(file: Path) -> list[Record]:
    return [Record.FromString(data) for data in logged(file.read_bytes())]


def logged(data: bytes) -> Iterator[bytes]:
    """The records of its log, in blocks of 32 KiB: each piece has a checksum, a length and a type; 1 and 4 end it."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class _Broken(Tracker):
    """Fails, or does not answer, at one of its calls."""

    def __init__(self, at: str, *, hangs: bool) -> None:
        self.at, self.hangs = at, hangs

    def _call(self, name: str) -> None:
        if name == self.at:
            if self.hangs:
                time.sleep(30)
            raise ConnectionError("the server\nis gone")

    def begin(self, name: str, settings: dict[str, str]) -> None:
        self._call("begin")

    def log(self, metrics: dict[str, float], seconds: int) -> None:
        self._call("log")

    def add_file(self, path: Path) -> None:
        self._call("add_file")

    def end(self, state: Ended) -> None:
        self._call("end")


@pytest.mark.parametrize(("at", "hangs"), [("begin", False), ("log", False), ("end", False), ("begin", True)])
def test_a_tracker_that_is_gone_costs_one_line(
    at: str, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.observe.exporters.tracking.BEGIN_S", 0.2)
    report = job(tmp_path, "out", TrackingListener(lambda: _Broken(at, hangs=hangs), every_s=0.01))
    assert report.ok == 61
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING and "_Broken" in one.getMessage()]
    assert ("does not answer" if hangs else "the server is gone") in record.getMessage()


def test_names_are_what_every_tracker_accepts() -> None:
    assert key("errors/no <b>\n\udcff é") == "errors/no _b___ _"
    assert key("/") == "_"
    assert len(key("x" * 1000)) == 200
