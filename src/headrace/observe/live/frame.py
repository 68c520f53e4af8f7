"""What a job or a server does now, for `headrace top` and the dashboard: one frame a second. Pure."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Literal

from headrace.observe.accounting.timeline import CAUSES, COMPUTING, LANES, STAGE_LANES, Cause
from headrace.observe.accounting.typed_json import parse_object
from headrace.wording import shown

VERSION = 1
_FORMAT = "headrace-live"
_WINDOW_S = 10.0
_MOST_ROWS = 200
_LONGEST = 300

Kind = Literal["job", "server"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the beginning, at the moment `at`."""

    at: float
    causes: Mapping[Cause, float]
    """Seconds of the device by cause."""
    stages: Mapping[str, float]
    """Seconds of work by host stage: load, prepare, finish, write."""
    counts: Mapping[str, float]
    """What is counted, such as records, failed, tokens, batches, requests."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker of a job, or a model of a server."""

    name: str
    state: str
    records: int
    busy: float | None
    """Fraction of the time with its engine busy; None if it is not measured."""
    lost: int = 0
    """How often its process died."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a job or a server does now. Rates, lanes and causes cover the last `window_s` seconds."""

    kind: Kind
    name: str
    state: str
    """Such as "running", "finished", "ready" or "draining"."""
    at: float
    """Seconds since 1970."""
    up_s: float
    """Seconds since it began."""
    window_s: float
    lanes: Mapping[str, float]
    """Threads or slots at work on average: read, prepare, device, finish, write."""
    rates: Mapping[str, float]
    """Per second, such as records and tokens."""
    causes: Mapping[Cause, float]
    """Share of the window by cause; they add up to 1."""
    causes_of_all: Mapping[Cause, float]
    """The same since it began."""
    counts: Mapping[str, float]
    """Since it began, such as records, failed, batches."""
    queue: Mapping[str, float]
    """What waits where."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """How often, by reason."""
    replicas: tuple[Replica, ...] = ()
    fraction: float | None = None
    """Done share of a job; None if it is unknown."""
    eta_s: float | None = None
    """Seconds that a job still needs; None if unknown."""
    advice: str = ""

    def as_json(self) -> str:
        """The frame as JSON text on one line."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Recent:
    """What changed in the last seconds."""

    window_s: float
    lanes: Mapping[str, float]
    rates: Mapping[str, float]
    causes: Mapping[Cause, float]


class Window:
    """Turns sums into what changed in the last seconds."""

    def __init__(self) -> None:
        self._totals: deque[Totals] = deque()

    def add(self, totals: Totals) -> Recent:
        """What changed since the sums of ten seconds ago, or the earliest since then; nothing if there are none."""
        if self._totals and totals.at - self._totals[-1].at > _WINDOW_S:
            self._totals.clear()
        self._totals.append(totals)
        while len(self._totals) > 2 and totals.at - self._totals[1].at >= _WINDOW_S:
            self._totals.popleft()
        return _difference(self._totals[0], totals)


def _difference(before: Totals, after: Totals) -> Recent:
    elapsed = after.at - before.at
    if elapsed <= 0:
        return Recent(0.0, {}, {}, {})
    # A later event may tell what a moment went into, so a sum may become a little smaller.
    seconds = {cause: max(after.causes.get(cause, 0.0) - before.causes.get(cause, 0.0), 0.0) for cause in CAUSES}
    stages = {
        lane: max(after.stages[stage] - before.stages.get(stage, 0.0), 0.0) / elapsed
        for stage, lane in STAGE_LANES.items()
        if stage in after.stages
    }
    lanes = {**stages, "device": min(sum(seconds[cause] for cause in COMPUTING) / elapsed, 1.0)}
    return Recent(
        elapsed,
        {lane: lanes[lane] for lane in LANES if lane in lanes},
        {name: max(count - before.counts.get(name, 0.0), 0.0) / elapsed for name, count in after.counts.items()},
        shares(seconds),
    )


def shares(seconds: Mapping[Cause, float]) -> dict[Cause, float]:
    """Each cause's share of all seconds; causes without any are left out."""
    whole = sum(seconds.values())
    return {cause: seconds[cause] / whole for cause in CAUSES if seconds.get(cause, 0.0) > 0}


def parse_frame(text: str | bytes) -> Frame:
    """The frame in JSON text. Raises ValueError: it is none, or of another version."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError("it is not a live state of headrace")
    if (found := content.pop("version", None)) != VERSION:
        raise ValueError(f"its version is {shown(found, 20)}, this headrace reads version {VERSION}")
    try:
        content["replicas"] = content["replicas"][:_MOST_ROWS]
        return parse_object(Frame, content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is incomplete or damaged: {error}") from error


def wall_clock() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()


def clock_text(seconds: float) -> str:
    """A duration as H:MM:SS or M:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten(text: str) -> str:
    """A text for a frame: of one line, and not too long."""
    return " ".join(text.split())[:_LONGEST]
