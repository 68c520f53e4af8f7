"""What a server shows of itself: its present state and its report."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.observe.live.frame import Frame, Replica, Window, shares, shorten, wall_clock
from headrace.observe.live.server import ServerAccount, server_advice
from headrace.observe.page.dashboard import Page, dashboard
from headrace.observe.page.render import ReportedJob, render
from headrace.serving.state import ServerState

_MOST_REASONS = 20


class ObservedServer:
    """The present state and the report of a server, for `serving.live`."""

    def __init__(self, state: ServerState, account: ServerAccount) -> None:
        self._state = state
        self._account = account
        self._window = Window()
        self.page: Page = dashboard()

    def frame(self) -> tuple[bytes, bool]:
        """The present state as JSON, and whether it holds rates: they need two moments."""
        frame = server_frame(self._state, self._account, self._window)
        return frame.as_json().encode(), frame.window_s > 0

    def report(self) -> str:
        return render([ReportedJob(self._account.name, "serving", self._account.runs())])


def server_frame(state: ServerState, account: ServerAccount, window: Window) -> Frame:
    """The present state of a server; `window` makes rates of its sums."""
    totals = account.totals()
    recent = window.add(totals)
    counts = dict(totals.counts)
    refused = sum(part.counted.refused for part in state.all_parts)
    return Frame(
        kind="server",
        name=shorten(account.name),
        state=state.status,
        at=wall_clock(),
        up_s=totals.at - account.began,
        window_s=recent.window_s,
        lanes=recent.lanes,
        rates=recent.rates,
        causes=recent.causes,
        causes_of_all=shares(totals.causes),
        counts={**counts, "refused": refused},
        queue=_queue(state),
        errors={shorten(reason): count for reason, count in list(account.errors().items())[:_MOST_REASONS]},
        replicas=tuple(_models(state)),
        advice=server_advice(recent.causes or totals.causes),
    )


def _queue(state: ServerState) -> dict[str, float]:
    services = [part.loaded for part in state.all_parts if part.loaded is not None]
    stats = [service.stats for service in services]
    return {
        "accepted": sum(service.admission.requests for service in services),
        "for a batch": sum(one.waiting for one in stats),
        "in the engine": sum(one.in_flight for one in stats),
    }


def _models(state: ServerState) -> Iterator[Replica]:
    for part in state.all_parts:
        stats, loaded = part.counted.stats, part.loaded
        done = stats.total_completed + stats.total_failed
        phase, busy = ("not loaded", None) if loaded is None else ("loaded", loaded.stats.window_utilization)
        yield Replica(shorten(part.name), phase, done, busy)
