"""One sentence of tuning advice, from a job's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BUSY_ENOUGH = 0.95
_PADDING_ENOUGH = 0.85
_MANY_FAILED = 0.1
_TOO_SHORT_S = 2.0
# A host stage explains idle time if it was active for at least this fraction of it.
_EXPLAINS = 0.5

_REMEDIES = {
    "load": "reading the input was the slowest step, so use faster storage or a columnar file such as Parquet",
    "prepare": "preparing the records was the slowest step, so give it more --workers",
    "finish": "finishing the results was the slowest step, so give it more --workers",
    "write": "writing the output was the slowest step, so use faster storage",
}


@dataclass(frozen=True, slots=True)
class AdviceInputs:
    """The figures for the advice; times in seconds."""

    records: int
    """In this run, including failed ones."""
    failed: int
    batches: int
    wall_s: float
    busy: float
    """Fraction of the wall time with a batch in the engine."""
    starved_s: float
    padding_efficiency: float
    host_s: Mapping[str, float]
    """Seconds by host stage: load, prepare, finish, write."""


def advise(numbers: AdviceInputs) -> str:
    """The most important advice: failures first, then the bottleneck, if any."""
    if numbers.records == 0:
        return "Nothing was left to do."
    if numbers.failed > _MANY_FAILED * numbers.records:
        share = numbers.failed / numbers.records
        return f"{share:.0%} of the records failed: read the errors file before tuning anything."
    if numbers.batches == 0 or numbers.wall_s < _TOO_SHORT_S:
        return "The run was too short to find a bottleneck."
    if numbers.padding_efficiency < _PADDING_ENOUGH and numbers.busy >= _BUSY_ENOUGH:
        wasted = 1 - numbers.padding_efficiency
        return (
            f"The engine was busy {numbers.busy:.0%} of the time, but {wasted:.0%} of what it computed was padding: "
            "batch records of similar length together (length bucketing)."
        )
    if numbers.busy >= _BUSY_ENOUGH:
        return (
            f"The engine was busy {numbers.busy:.0%} of the time: the host is not the bottleneck; use a faster device, "
            "a lower precision or a smaller model."
        )
    return _about_idle_time(numbers)


def _about_idle_time(numbers: AdviceInputs) -> str:
    """Advice for an idle engine: a slow host stage before or after the engine makes it wait between batches."""
    free = f"The engine was free {1 - numbers.busy:.0%} of the time"
    idle_s = numbers.wall_s * (1 - numbers.busy)
    if numbers.starved_s < _EXPLAINS * idle_s:
        return f"{free}, most of it before the first batch or after the last: a longer run will be busier."
    stage, stage_s = max(numbers.host_s.items(), key=lambda item: item[1])
    if stage_s >= _EXPLAINS * idle_s:
        return f"{free}: {_REMEDIES[stage]}."
    mean = numbers.records / numbers.batches
    return (
        f"{free} between batches of {mean:.0f} records, and no host stage explains it: larger batches would cost less "
        "per record."
    )
