"""`headrace.MLflowListener`: reports jobs to MLflow."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from headrace.extras import require
from headrace.observe.exporters.tracking import Ended, Tracker, TrackingListener
from headrace.observe.live.frame import wall_clock

logger = logging.getLogger("headrace")

_LONGEST_VALUE = 5_000
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflowListener(TrackingListener):
    """Reports jobs to MLflow: settings as parameters, figures as metrics over time, the report page as an artifact.

    MLflow's own settings say where: `mlflow.set_tracking_uri`, `mlflow.set_experiment`, or the environment variables
    MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID. If a run is active where the listener is made, the
    job is reported to that run, which stays open. Otherwise each job is its own run.

    Args:
        every_s: seconds between two sets of figures.

    Raises:
        MissingExtraError: MLflow is not installed.
    """

    extra: ClassVar[str] = "mlflow"

    def __init__(self, every_s: float = 10.0) -> None:
        mlflow = require("mlflow", "mlflow", "MLflow")
        active = mlflow.active_run()
        super().__init__(lambda: _MLflowRun(mlflow, None if active is None else active.info.run_id), every_s)


class _MLflowRun(Tracker):
    def __init__(self, mlflow: ModuleType, active: str | None) -> None:
        self._mlflow = mlflow
        self._id = active
        self._is_own = active is None

    def begin(self, name: str, settings: dict[str, str]) -> None:
        if self._id is None:
            self._id = self._mlflow.start_run(run_name=name).info.run_id
        self._client = self._mlflow.MlflowClient()
        from mlflow.entities import Param

        cut = {key: value[:_LONGEST_VALUE] for key, value in settings.items()}
        known = self._client.get_run(self._id).data.params
        if other := [key for key, value in cut.items() if known.get(key, value) != value]:
            logger.warning(
                "headrace: the MLflow run %s has other values of %s; MLflow keeps the first ones", self._id, other
            )
        self._client.log_batch(self._id, params=[Param(key, cut[key]) for key in cut.keys() - known.keys()])

    def log(self, metrics: dict[str, float], seconds: int) -> None:
        from mlflow.entities import Metric

        now_ms = round(wall_clock() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, seconds) for name, value in metrics.items()])

    def add_file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def end(self, state: Ended) -> None:
        if self._is_own:
            self._mlflow.end_run(_STATUS[state])
