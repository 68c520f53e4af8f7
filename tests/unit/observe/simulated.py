"""A job in virtual time: its stages run side by side with bounded queues, and its events are those of a real one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    CloseReason,
    DeviceUsed,
    Event,
    JobDone,
    JobStarted,
    MemoryUsed,
    PipelineWaited,
    StageDone,
    WorkUnitDone,
)
from headrace.events import PartCommitted as Committed
from headrace.observe.reporting.report import Report, ReportBuilder
from headrace.observe.reporting.run_facts import RunFacts


@dataclass(frozen=True, slots=True)
class Simulation:
    """Seconds per record of each stage, and the settings that advice may name."""

    records: int = 4_000
    read_s: float = 0.0005
    prepare_s: float = 0.0005
    finish_s: float = 0.0001
    write_s: float = 0.0001
    record_s: float = 0.002
    fixed_s: float = 0.0
    """Of each batch."""
    workers: int = 1
    batch_size: int = 50
    delay_s: float = 0.0
    """How long the batcher holds back a batch that is not full."""
    padding: float = 0.0
    out_of_memory_above: int = 10_000
    cores: int = 8
    cpu_share: float = 1.0
    """Of the time of preparing, in which it uses a core."""
    repeated: float = 0.0
    """Fraction of the records that are equal to an earlier one."""
    dedupe: bool = False
    replicas: int = 1
    """Devices, each with an engine."""
    room_wait_s: float = 0.0
    """How long each batch waits until the records before it have left memory."""
    closed_by: CloseReason = "full_size"
    """What ends each batch."""
    on_workers: bool = False
    """Whether the devices are those of workers."""
    device: DeviceUsed | None = None
    """What the device measured."""
    larger_pay: bool | None = None
    """Whether batches above the largest budget would be faster."""
    host: RunFacts = field(default_factory=RunFacts)
    """Further facts."""

    def run(self) -> Report:
        """The report of the job."""
        host = replace(self.host, cores=self.cores, workers=self.workers, batch_size=self.batch_size)
        builder = ReportBuilder(0.0, host)
        for event in sorted(self._events(), key=lambda event: getattr(event, "at", 0.0)):
            builder(event)
        return builder.build()

    def _events(self) -> list[Event]:
        events: list[Event] = [JobStarted(None, self.records, 0, 1.0)]
        chunk = 40
        count = math.ceil(self.records / chunk)
        read = 1.0
        free_workers = [1.0] * self.workers
        ready: list[float] = []
        for _ in range(count):
            read += self.read_s * chunk
            events.append(StageDone("load", chunk, self.read_s * chunk, read))
            worker = free_workers.index(min(free_workers))
            free_workers[worker] = max(read, free_workers[worker]) + self.prepare_s * chunk
            took = self.prepare_s * chunk
            repeated = 0 if self.dedupe else round(self.repeated * chunk)
            events.append(
                StageDone(
                    "prepare", chunk, took, free_workers[worker], cpu_s=took * self.cpu_share, compared=chunk,
                    repeated=repeated,
                )
            )  # fmt: skip
            ready.append(free_workers[worker])
        self._compute(events, sorted(ready), chunk)
        return events

    def _compute(self, events: list[Event], ready: list[float], chunk: int) -> None:
        sink = 1.0
        devices = [1.0] * self.replicas
        left, number, done, arrived, at = float(self.records), 0, 0, 0, 0.0
        while left > 0:
            size = int(min(self.batch_size * (1 - number % 3 * 0.25), left))  # of several sizes, as real ones
            wanted = self.records - left + size
            while arrived < wanted:
                at = ready[arrived // chunk]
                arrived += chunk
            first = devices.index(min(devices))
            device = devices[first]
            start, company = max(device, at), self.delay_s
            start += company
            tried = 0.0
            if size > self.out_of_memory_above:
                tried = self.fixed_s + size * self.record_s
                events.append(BatchSplit(number, size, MemoryError(), True, start + tried, tried))
            new = size * (1 - self.repeated) if self.dedupe else size
            took = tried + self.fixed_s + new * self.record_s / (1 - self.padding)
            end = start + took
            padded = size / (1 - self.padding)
            events.append(BatchFormed(number, size, size, padded, self.closed_by, start - device, start, company, 0.01))
            events.append(BatchDone(number, size, 0, size, padded, took, end))
            if self.on_workers:
                events.append(WorkUnitDone(str(first), size, 0, 1, took, end))
            events.append(Committed(done, done + size, 0, 10, end))
            finished = max(sink, end) + size * self.finish_s
            events.append(StageDone("finish", size, size * self.finish_s, finished))
            sink = finished + size * self.write_s
            events.append(StageDone("write", size, size * self.write_s, sink))
            device = max(end, sink - 2.0)  # finished results that wait take two seconds to write at most
            if device > end:
                events.append(PipelineWaited("sink", device - end, device))
            if self.room_wait_s:
                device += self.room_wait_s
                events.append(PipelineWaited("memory", self.room_wait_s, device))
            devices[first] = device
            left, number, done = left - size, number + 1, done + size
        ended = max(*devices, sink)
        if self.device is not None:
            events.append(replace(self.device, at=ended))
        if self.larger_pay is not None:
            events.append(MemoryUsed(1, 2, "memory", ended, self.larger_pay))
        events.append(JobDone("finished", ended))


def changed(simulation: Simulation, **settings: float) -> Simulation:
    """The same job with other settings."""
    return replace(simulation, **settings)  # type: ignore[arg-type]
