"""What an experiment tracker gets of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.observe.simulated import Simulation

from headrace.events import RunDescribed
from headrace.observe.exporters.tracking import Ended, Tracker, TrackingListener
from headrace.wording import Interface, speak


class Kept(Tracker):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.page = ""
        self.metrics: dict[str, float] = {}

    def begin(self, name: str, settings: dict[str, str]) -> None: ...

    def log(self, metrics: dict[str, float], seconds: int) -> None:
        self.metrics = metrics

    def add_file(self, path: Path) -> None:
        self.page = path.read_text(encoding="utf-8").partition("<script")[0]

    def end(self, state: Ended) -> None: ...


@pytest.mark.parametrize(
    ("door", "named", "other"), [("python", "batch_size=", "--batch-size"), ("flags", "--batch-size", "batch_size=")]
)
def test_the_page_names_settings_as_the_user_gives_them(door: Interface, named: str, other: str) -> None:
    kept = Kept()
    listener = TrackingListener(lambda: kept, every_s=3_600.0)
    speak(door)
    try:
        listener(RunDescribed("a job", {}, {}, 0.0))
        for event in sorted(Simulation(padding=0.4)._events(), key=lambda event: getattr(event, "at", 0.0)):
            listener(event)
    finally:
        speak("python")
    assert "of what the engine computed was padding" in kept.page
    assert named in kept.page
    assert other not in kept.page
    assert kept.metrics["total/records"] == 4_000
