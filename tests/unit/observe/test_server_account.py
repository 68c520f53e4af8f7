"""Every second of a server's device has one cause, whatever its clients do and however long it runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace.app.servers.settings  # noqa: F401 - declares the settings that advice names
from headrace.events import BatchDone, BatchFormed, Event, ModelLoaded, RequestDone, StageDone, StepDone
from headrace.observe.live.server import ServerAccount, numbered, server_advice


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def account_of(events: list[Event], now: float, began: float = 0.0) -> ServerAccount:
    clock = Clock()
    account = ServerAccount("model", began, clock)
    for event in events:
        account(event)
    clock.now = now
    return account


def batch(number: int, start: float, end: float, *, waited: float = 0.0, company: float = 0.0) -> list[Event]:
    formed = BatchFormed(number, 4, 4, 4, "idle", waited, start, company, waited)
    return [formed, BatchDone(number, 4, 0, 4, 4, end - start, end)]


def request(start: float, end: float, status: int = 200, method: str = "POST") -> RequestDone:
    return RequestDone("/generate", method, status, end - start, end)


def test_a_request_is_prepared_waits_is_computed_and_answered() -> None:
    events: list[Event] = [
        ModelLoaded("model", 2.0, 2.0),
        StageDone("prepare", 4, 0.5, 10.75),  # the request came at 10 and was parsed until 10.25
        *batch(0, 11.0, 12.0, waited=0.25, company=0.125),
        request(10.0, 12.5),
    ]
    causes = account_of(events, 20.0).totals().causes
    spent = {cause: seconds for cause, seconds in causes.items() if seconds}
    assert spent == {"starting": 2.0, "idle": 15.5, "prepare": 0.5, "company": 0.125, "real": 1.0, "other": 0.875}


def test_records_that_wait_show_before_their_requests_are_done() -> None:
    causes = account_of(batch(0, 5.0, 6.0, waited=2.0), 6.0).totals().causes
    assert causes["other"] == 2.0
    assert causes["idle"] == 3.0


def test_a_look_at_the_state_takes_no_time() -> None:
    account = account_of([request(0, 9, method="GET")], 10)
    assert account.totals().causes["idle"] == 10
    assert account.totals().counts["requests"] == 0


def test_errors_are_counted_by_status_and_route() -> None:
    account = account_of([request(0, 1, 429), request(0, 1, 429), request(0, 1, 400), request(0, 1)], 2)
    assert account.errors() == {"429 on /generate": 2, "400 on /generate": 1}


def test_the_batches_of_several_models_are_kept_apart() -> None:
    clock = Clock()
    account = ServerAccount("two", 0.0, clock)
    first, second = numbered(account, 0, 2), numbered(account, 1, 2)
    (formed, done), (other_formed, other_done) = batch(0, 1, 4, waited=0.5), batch(0, 2, 3, waited=0.25)
    for listen, event in ((first, formed), (second, other_formed), (second, other_done), (first, done)):
        listen(event)
    first(request(0, 1))  # its server reports it
    clock.now = 4.0
    (run,) = account.runs()
    assert run.account.causes["real"] == 3.0
    assert sum(count for _, _, count, _ in run.account.histograms["waited"]) == 2
    assert account.totals().counts["requests"] == 0


def test_many_days_take_bounded_memory_and_no_second_is_lost() -> None:
    clock = Clock()
    account = ServerAccount("model", 0.0, clock)
    for minute in range(3 * 24 * 60):
        clock.now = minute * 60.0
        for event in (*batch(minute, clock.now, clock.now + 15), request(clock.now, clock.now + 15)):
            account(event)
    clock.now = 3 * 24 * 3600.0
    assert sum(account.totals().causes.values()) == pytest.approx(clock.now)
    assert account.totals().causes["real"] == pytest.approx(clock.now / 4)
    assert account.totals().counts["requests"] == 3 * 24 * 60
    runs = account.runs()
    assert 1 <= len(runs) <= 2
    assert sum(run.account.wall_s for run in runs) <= 7_300
    assert all(len(run.account.batches) <= 600 for run in runs)


TIME = st.floats(min_value=0, max_value=20_000, allow_nan=False)
DURATION = st.floats(min_value=0, max_value=5_000, allow_nan=False)
NUMBER = st.integers(min_value=0, max_value=3)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(lambda took, at, status: RequestDone("/x", "POST", status, took, at), DURATION, TIME, st.just(200)),
    st.builds(BatchFormed, NUMBER, NUMBER.map(lambda n: n + 1), DURATION, DURATION, st.just("idle"), DURATION, TIME,
              DURATION, DURATION),
    st.builds(lambda n, took, at: BatchDone(n, 4, 1, 4, 8, took, at), NUMBER, DURATION, TIME),
    st.builds(lambda took, at: StepDone(0, 4, 1, 1, 0, 0, 4, took, 0, at), DURATION, TIME),
    st.builds(lambda took, at: StageDone("prepare", 4, took, at), DURATION, TIME),
    st.builds(ModelLoaded, st.just("m"), DURATION, TIME),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=60))
def test_for_any_events_the_causes_add_up_and_no_counter_falls(events: list[Event]) -> None:
    clock = Clock()
    account = ServerAccount("model", 0.0, clock)
    before = account.seconds_by_cause()
    for event in events:
        account(event)
        clock.now = max(clock.now, event.at)
        after = account.seconds_by_cause()
        assert all(after[cause] >= before[cause] for cause in after)
        before = after
    causes = account.totals().causes
    assert sum(causes.values()) >= clock.now * (1 - 1e-9)
    assert all(seconds >= 0 for seconds in causes.values())
    assert sum(sum(run.account.causes.values()) - run.account.wall_s for run in account.runs()) == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize(
    ("causes", "advice"),
    [
        ({"idle": 90.0, "real": 10.0}, "for 90% there was no request: it has room for more"),
        ({"real": 60.0, "padding": 40.0}, "40% went into padding"),
        ({"real": 60.0, "company": 40.0}, "a smaller --batch-timeout-ms"),
        ({"real": 50.0, "prepare": 40.0, "idle": 10.0}, "waited for texts or images to be prepared"),
        ({"real": 50.0, "other": 40.0}, "fewer, larger requests"),
        ({"real": 99.0, "idle": 1.0}, "only a faster device"),
        ({"starting": 5.0}, "has taken no request yet"),
    ],
)
def test_the_advice_names_what_costs_most(causes: dict[str, float], advice: str) -> None:
    assert advice in server_advice(causes)  # type: ignore[arg-type]
