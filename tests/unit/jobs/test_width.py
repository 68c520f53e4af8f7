from __future__ import annotations

from headrace.jobs.pipeline.concurrency_tuner import ConcurrencyTuner


def chunks(width: ConcurrencyTuner, count: int, waited: float, prepared: float) -> None:
    for _ in range(count):
        width.waited(waited)
        width.prepared(prepared)


def test_it_grows_while_preparing_is_what_is_waited_for() -> None:
    width = ConcurrencyTuner(None, cores=4)
    chunks(width, 8, waited=0.4, prepared=1.0)
    assert width.now == 3
    chunks(width, 80, waited=0.4, prepared=1.0)
    assert width.now == width.most == 4


def test_it_stays_where_nobody_waits() -> None:
    width = ConcurrencyTuner(None, cores=8)
    chunks(width, 80, waited=0.0, prepared=1.0)
    assert width.now == 2


def test_it_stays_where_reading_is_what_is_waited_for() -> None:
    width = ConcurrencyTuner(None, cores=8)
    chunks(width, 80, waited=5.0, prepared=0.1)
    assert width.now == 2


def test_a_number_is_obeyed() -> None:
    width = ConcurrencyTuner(3, cores=8)
    chunks(width, 80, waited=0.4, prepared=1.0)
    assert width.now == width.most == 3
