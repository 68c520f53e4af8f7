"""Engines that fail and overlap as those on a GPU do, for child processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.device.forward import ForwardMeter
from headrace.device.memory import AvailableMemory, PeakMeter
from headrace.engines.profile import EngineProfile
from headrace.errors import EngineDeadError
from headrace.testing import FakeEngine


class AcceleratorError(RuntimeError):
    """As torch's own."""


class Held(PeakMeter):
    """Holds 1 GB, and a megabyte for each text of the largest batch."""

    def __init__(self) -> None:
        self.texts = 0

    def restart(self) -> bool:
        return True

    def peaks(self) -> tuple[int, ...]:
        return 10**9 + 10**6 * self.texts, 2 * 10**9


class OnGpu(FakeEngine):
    """Text 17 ends CUDA's context in its process: each later call fails too. Each process signs in a folder."""

    tunable = True
    place = "cuda:1"

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self.folder = Path(str(model))
        self.is_lost = False
        self.peaks = Held()
        self.meter = ForwardMeter(None, "", lambda: (AvailableMemory(8 * 10**9, "a GPU"), self.peaks), self.place)
        (self.folder / f"{os.getpid()}.pid").touch()

    @property
    def profile(self) -> EngineProfile:
        return replace(super().profile, overlaps=True)

    def hardware(self) -> Mapping[str, object]:
        return {"device": "a GPU"}

    def dtype_speeds(self) -> Mapping[str, float]:
        return {}

    def forward_meter(self) -> ForwardMeter:
        return self.meter

    def forward(self, batch: Sequence[Any]) -> list[Any]:
        self.is_lost = self.is_lost or any(text.startswith("text 17 ") for text in batch)
        if self.is_lost:
            raise EngineDeadError("cuda:1 failed") from AcceleratorError("CUDA error: device-side assert triggered")
        self.peaks.texts = max(self.peaks.texts, len(batch))
        self.meter.add(0.001, [])
        return super().forward(list(batch))


class Together(OnGpu):
    """Two batches and a preparation must be in the engine at once, or they wait in vain."""

    def __init__(self, model: str | None) -> None:
        super().__init__(model)
        self._meets = threading.Barrier(3, timeout=20)

    def prepare(self, inputs: Sequence[Any]) -> list[Any]:
        if inputs[0] == "meet":
            self._meets.wait()
        return super().prepare(list(inputs))

    def forward(self, batch: Sequence[Any]) -> list[Any]:
        self._meets.wait()
        return [1.0 for _ in batch]
