"""What a job does now, from its report and account. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.events import HostStage
from headrace.observe.accounting.timeline import STAGE_LANES
from headrace.observe.live.frame import Frame, Replica, Totals, Window, shares, shorten, wall_clock
from headrace.observe.reporting.run_figures import Report
from headrace.wording import spelled

_MOST_REASONS = 20


def job_frame(name: str, state: str, report: Report, window: Window, now: float) -> Frame:
    """The present state of a job.

    Args:
        window: takes the sums; it makes rates of them.
    """
    account, passed = report.account, report.progress
    stages = {str(stage): getattr(report.times, stage) for stage in STAGE_LANES}
    counts = _counts(report)
    recent = window.add(Totals(now, account.causes, stages, counts))
    done = report.skipped + counts["records"] + counts["failed"]
    read = report.skipped + passed.records["load"]
    fraction = 1.0 if state == "finished" else passed.input_size.fraction(round(done), read, passed.read_bytes)
    rate = recent.rates.get("records", 0.0) + recent.rates.get("failed", 0.0)
    return Frame(
        kind="job",
        name=shorten(name),
        state=state,
        at=wall_clock(),
        up_s=account.wall_s,
        window_s=recent.window_s,
        lanes=recent.lanes,
        rates=recent.rates,
        causes=recent.causes,
        causes_of_all=shares(account.causes),
        counts={**counts, "skipped": report.skipped},
        queue=_queue(counts, passed.records),
        errors={shorten(reason): count for reason, count in list(report.failures.items())[:_MOST_REASONS]},
        replicas=tuple(
            Replica(shorten(lane.worker), "lost" if lane.lost and not lane.records else "running", lane.records,
                    lane.busy, lane.lost)
            for lane in report.lanes
        ),
        fraction=fraction,
        eta_s=done * (1 - fraction) / fraction / rate if fraction and rate and state == "running" else None,
        advice=shorten(spelled(report.advice, "flags")) if report.ok else "",
    )  # fmt: skip


def _counts(report: Report) -> dict[str, float]:
    """What has been computed; records that are computed and not written yet count."""
    records = round(sum(report.account.bins.get("records", ())))
    tokens = {"tokens": float(report.tokens)} if report.tokens else {}
    return {"records": records, "failed": report.failed, "batches": report.batches, **tokens}


def _queue(counts: Mapping[str, float], passed: Mapping[HostStage, int]) -> dict[str, float]:
    """Records between two stages. Those that are read and refused, or equal to another, make it inexact."""
    computed = counts["records"] + counts["failed"]
    return {
        "being prepared": max(passed["load"] - max(passed["prepare"], computed), 0),
        "for the device": max(passed["prepare"] - computed, 0),
        "to be written": max(computed - passed["write"], 0),
    }
