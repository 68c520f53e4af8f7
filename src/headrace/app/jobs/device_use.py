"""Reports at the end of a job what its device did: computing time, operations, peaks, energy; or its servers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.device.cache import TuningCache, cpu_facts
from headrace.device.forward import ForwardMeter
from headrace.device.nvml import GpuReading, Nvml, open_gpu
from headrace.engines.base import Engine
from headrace.engines.capabilities import REQUESTING, TUNING, RequestingEngine, TunableEngine
from headrace.events import DeviceUsed, Event, JobDone, JobStarted, Listener

WORTH_S = 2.0
"""Peaks are measured, which takes half a second once, for jobs that computed at least this long."""


def watch_device(engine: Engine, tell: Listener, cache: TuningCache | None = None) -> Listener | None:
    """A listener for the engine's job; None if the engine neither measures its forward passes nor sends requests."""
    if (requesting := REQUESTING.of(engine)) is not None:
        return _watch_requests(requesting, tell)
    tunable = TUNING.of(engine)
    meter = None if tunable is None else tunable.forward_meter()
    if tunable is None or meter is None:
        return None
    return DeviceWatch(tunable, meter, tell, cache or TuningCache(), open_gpu(meter.gpu) if meter.gpu else None)


def _watch_requests(engine: RequestingEngine, tell: Listener) -> Listener:
    """A listener that says at the end of a job what became of its requests."""

    def at_end(event: Event) -> None:
        if isinstance(event, JobDone):
            tell(engine.use())

    return at_end


class DeviceWatch:
    """Measures from the start of a job to its end."""

    def __init__(
        self, engine: TunableEngine, meter: ForwardMeter, tell: Listener, cache: TuningCache, gpu: Nvml | None
    ) -> None:
        self._engine = engine
        self._meter = meter
        self._tell = tell
        self._cache = cache
        self._gpu = gpu
        self._before = meter.read()
        self._reading: GpuReading | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case JobStarted():
                self._before = self._meter.read()
                self._reading = self._gpu.read() if self._gpu is not None else None
            case JobDone():
                self._end(event.at)

    def _end(self, at: float) -> None:
        done = self._meter.read().since(self._before)
        if not done.passes:
            return
        last = self._gpu.read() if self._gpu is not None else None
        energy = activity = None
        if self._gpu is not None and self._reading is not None and last is not None:
            energy, activity = last.energy_j - self._reading.energy_j, self._gpu.activity(self._reading, last)
        dtype = str(self._engine.describe().get("dtype", ""))
        peaks = self._peaks(dtype) if done.seconds >= WORTH_S and done.operations else {}
        self._tell(
            DeviceUsed(
                computed_s=done.seconds,
                operations=done.operations,
                weight_bytes=done.weight_bytes,
                peak_operations=peaks.get("operations", 0.0),
                peak_bytes=peaks.get("bytes", 0.0),
                dtype=dtype,
                energy_j=energy,
                clock_mhz=last.clock_mhz if last is not None else None,
                power_limit_w=last.power_limit_w if last is not None else None,
                kernels=activity.kernels if activity is not None else None,
                tensor_cores=activity.tensor_cores if activity is not None else None,
                memory_bus=activity.memory if activity is not None else None,
                replayed=done.replayed / done.passes,
                no_graphs=self._meter.no_graphs,
                at=at,
            )
        )

    def _peaks(self, dtype: str) -> Mapping[str, float]:
        """Operations and bytes per second that the device reaches, measured once."""
        key: dict[str, object] = {"peaks": dtype, **cpu_facts(), **self._engine.hardware()}
        kept = self._cache.read(key)
        if kept is None:
            kept = dict(self._meter.device_peaks(dtype))
            self._cache.write(key, kept)
        return {
            name: float(value)
            for name, value in kept.items()
            if isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        }
