"""What a device did, and which limit binds it, from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.events import DeviceUsed, JobDone, JobStarted
from headrace.observe.accounting.device_limit import device_figures
from headrace.observe.reporting.lines import device as device_rows
from headrace.observe.reporting.report import ReportBuilder
from headrace.observe.reporting.summary import RunSummary, figures_of, parse_runs
from headrace.observe.reporting.table import as_text

USED = DeviceUsed(
    computed_s=8.0,
    operations=4e12,
    weight_bytes=8e9,
    peak_operations=1e12,
    peak_bytes=1e10,
    dtype="bfloat16",
    at=10.0,
    energy_j=2_000.0,
    clock_mhz=1_980.0,
    power_limit_w=700.0,
    kernels=0.78,
    tensor_cores=0.4,
    memory_bus=0.25,
)


@pytest.mark.parametrize(
    ("used", "fixed_s", "limit"),
    [
        (USED, 0.0, "compute"),
        (replace(USED, computed_s=6.9), 0.0, "host"),
        (USED, 0.05, "launch"),
        (replace(USED, weight_bytes=8e10), None, "memory bandwidth"),
        (replace(USED, peak_operations=0.0), None, None),
    ],
)
def test_the_limit_that_binds_is_named(used: DeviceUsed, fixed_s: float | None, limit: str | None) -> None:
    found = device_figures(used, wall_s=10.0, records=1_000, fixed_s=fixed_s, batches=100)
    assert found is not None and found.limit == limit


def test_the_figures_are_those_of_the_run() -> None:
    found = device_figures(USED, 10.0, 1_000, 0.0, 100)
    assert found is not None
    assert (found.computed, found.operations_per_record, found.mfu) == (0.8, 4e9, 0.5)
    assert (found.watts, found.joules_per_record, found.clock_mhz) == (200.0, 2.0, 1_980.0)
    assert device_rows(found) == [
        ("device computed", "80.0% of wall in forward passes; limited by compute"),
        ("arithmetic", "4.0 GFLOP per record, 500.0 GFLOP/s, 50% of the measured bfloat16 peak (MFU)"),
        ("GPU counters", "kernels ran 78% of wall; tensor cores 40%, memory 25%"),
        ("power", "200 W of 700 W allowed, 2 J per record, 1,980 MHz at the end"),
    ]
    assert device_figures(replace(USED, computed_s=0.0), 10.0, 1_000, None, 0) is None


def test_they_are_in_the_report_and_in_what_is_kept_of_it() -> None:
    from headrace.events import PartCommitted

    builder = ReportBuilder(0.0)
    builder(JobStarted(None, 1_000, 0, 0.0))
    builder(PartCommitted(0, 1_000, 0, 100, 9.0))
    builder(replace(USED, replayed=0.25, no_graphs="off: the model waits for the device"))
    builder(JobDone("finished", 10.0))
    report = builder.build()
    assert report.device is not None and report.device.operations_per_record == 4e9
    kept = json.loads(RunSummary(0.0, "finished", figures_of(report), report.account, {}, {}).as_json())

    def read(**device: object) -> object:
        figures = {name: value for name, value in kept["figures"].items() if name != "device"} | device
        content = {"format": "headrace-report", "version": 1, "runs": [{**kept, "figures": figures}]}
        return parse_runs(content)[0].figures.device

    assert read(device=kept["figures"]["device"]) == report.device
    assert read() is None  # of an earlier version
    with pytest.raises(ValueError, match="number is not valid"):
        read(device={**kept["figures"]["device"], "computed": "much"})
    assert "headrace run: finished" in as_text(report)
    reason = "off: the model waits for the device"
    assert ("CUDA graphs", f"25% of the batches were replays of captured ones; {reason}") in device_rows(report.device)
