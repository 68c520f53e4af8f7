"""The figures of one step, for a job of several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What this run did in one step of a job of several."""

    name: str
    model: str
    loads: int
    """How often the model was loaded; 0 if the step was finished before."""
    records: int
    """Finished records, those of earlier runs and failed ones included."""
    failed: int
    """How many of them failed, in this step or before it."""
    load_s: float
    """Seconds until the first batch: loading the model, and choosing its dtype."""
    wall_s: float
    """Seconds of the whole step."""
