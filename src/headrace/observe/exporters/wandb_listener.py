"""`headrace.WandbListener`: reports jobs to Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from headrace.extras import require
from headrace.observe.exporters.tracking import Ended, Tracker, TrackingListener

_INIT_S = 30


class WandbListener(TrackingListener):
    """Reports jobs to Weights & Biases: settings as the config, figures over time, the report page as an artifact.

    Its own environment variables say where: WANDB_PROJECT (default: headrace), WANDB_ENTITY, WANDB_MODE=offline. If a
    run is active where the listener is made, the job is reported to that run, which stays open. Otherwise each job is a
    new run.

    Args:
        every_s: seconds between two sets of figures.

    Raises:
        MissingExtraError: its library is not installed.
    """

    extra: ClassVar[str] = "wandb"

    def __init__(self, every_s: float = 10.0) -> None:
        wandb = require("wandb", "wandb", "Weights & Biases")
        active = wandb.run
        super().__init__(lambda: _WandbRun(wandb, active), every_s)


class _WandbRun(Tracker):
    def __init__(self, wandb: Any, active: Any) -> None:
        self._wandb = wandb
        self._run = active
        self._is_own = active is None

    def begin(self, name: str, settings: dict[str, str]) -> None:
        if self._is_own:
            quiet = self._wandb.Settings(silent=True, console="off", init_timeout=_INIT_S)
            project = os.environ.get("WANDB_PROJECT", "headrace")
            self._run = self._wandb.init(project=project, name=name, reinit="create_new", settings=quiet)
        self._run.config.update(settings, allow_val_change=True)
        self._run.define_metric("headrace/seconds", hidden=True)
        self._run.define_metric("headrace/*", step_metric="headrace/seconds")

    def log(self, metrics: dict[str, float], seconds: int) -> None:
        named = {f"headrace/{name}": value for name, value in metrics.items()}
        self._run.log({**named, "headrace/seconds": seconds})

    def add_file(self, path: Path) -> None:
        artifact = self._wandb.Artifact("headrace-report", type="report")
        artifact.add_file(str(path), path.name)
        self._run.log_artifact(artifact)

    def end(self, state: Ended) -> None:
        if self._is_own:
            self._run.finish(exit_code=0 if state == "finished" else 1)
