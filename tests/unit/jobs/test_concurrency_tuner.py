from __future__ import annotations

from headrace.jobs.pipeline.concurrency_tuner import ConcurrencyTuner


def chunks(tuner: ConcurrencyTuner, count: int, waited: float, prepared: float) -> None:
    for _ in range(count):
        tuner.waited(waited)
        tuner.prepared(prepared)


def test_it_grows_while_preparing_is_what_is_waited_for() -> None:
    tuner = ConcurrencyTuner(None, cores=4)
    chunks(tuner, 8, waited=0.4, prepared=1.0)
    assert tuner.now == 3
    chunks(tuner, 80, waited=0.4, prepared=1.0)
    assert tuner.now == tuner.most == 4


def test_it_stays_where_nobody_waits() -> None:
    tuner = ConcurrencyTuner(None, cores=8)
    chunks(tuner, 80, waited=0.0, prepared=1.0)
    assert tuner.now == 2


def test_it_stays_where_reading_is_what_is_waited_for() -> None:
    tuner = ConcurrencyTuner(None, cores=8)
    chunks(tuner, 80, waited=5.0, prepared=0.1)
    assert tuner.now == 2


def test_a_number_is_obeyed() -> None:
    tuner = ConcurrencyTuner(3, cores=8)
    chunks(tuner, 80, waited=0.4, prepared=1.0)
    assert tuner.now == tuner.most == 3
