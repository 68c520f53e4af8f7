"""A signal before the job has begun ends the process, whatever catches what it raises."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.cli import signals as stopping
from headrace.errors import StoppedEarly


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("_handlers")
def test_the_process_ends_though_user_code_catches_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    done = threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        done.set()

    monkeypatch.setattr(stopping, "CLEARING_UP_S", 0.0)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(StoppedEarly):
        stopping.Stopper().handle(signal.SIGUSR2, None)
    assert done.wait(60)
    assert ended == [128 + signal.SIGUSR2]
