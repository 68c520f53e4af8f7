"""Each situation gets the sentence that helps there, and following it does what it said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.unit.observe.simulated import Simulation, changed

import headrace.jobs.settings  # noqa: F401 - tells messages what the settings of a job are called
from headrace.events import (
    DeviceUsed,
    JobDone,
    JobStarted,
    PartCommitted,
    PrecisionChosen,
    PrefixCacheUsed,
    PromptsCompared,
    StepDone,
)
from headrace.observe.reporting.advice import advise
from headrace.observe.reporting.report import Report, ReportBuilder
from headrace.observe.reporting.run_facts import RunFacts
from headrace.observe.reporting.run_figures import StageTimes
from headrace.observe.reporting.table import as_text
from headrace.wording import spelled

QUIET = StageTimes(load=0.1, prepare=0.1, finish=0.1, write=0.1)
GOOD = Report(
    state="finished",
    ok=1_000,
    batches=50,
    wall_s=100.0,
    busy=0.98,
    padding_efficiency=0.97,
    times=QUIET,
    causes={"real": 95.0, "padding": 3.0, "other": 2.0},
)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (GOOD, "the host is not the bottleneck"),
        (replace(GOOD, ok=0, batches=0), "Nothing was left to do"),
        (replace(GOOD, ok=800, failed=200), "20% of the records failed: read the errors file"),
        (replace(GOOD, wall_s=1.0), "too short"),
        (
            replace(GOOD, padding_efficiency=0.6, causes={"real": 58, "padding": 39}, mean_cost=900.0),
            "40% of what the engine computed was padding: --batch-size 2 would",
        ),
        (replace(GOOD, busy=0.5, causes={"real": 50, "draining": 40}), "before the first batch or after the last"),
        (replace(GOOD, busy=0.5, causes={"real": 50, "read": 40}, fill_s=40.0), "before the first batch or after"),
        (replace(GOOD, busy=0.5, causes={"real": 50, "other": 50}), "no single setting explains it"),
        (
            replace(GOOD, causes={"real": 98, "starting": 60}, precision=PrecisionChosen("bfloat16", "", 40.0, 0.0)),
            "Starting took 60 s of 158 s, 40 s of it to choose a data type: --dtype bfloat16 would save those 40 s",
        ),
        (
            replace(GOOD, precision=PrecisionChosen("bfloat16", "", 0.0, 0.0, 0.2)),
            "This device computes bfloat16 at 0.2 times the speed of float32: --dtype float32 would save about 78 s",
        ),
    ],
)
def test_advice(numbers: Report, expected: str) -> None:
    advice = spelled(advise(numbers), "flags")
    assert expected in advice
    assert advice.endswith(".")
    assert advice.count(". ") == 0  # one sentence


def test_a_busy_engine_is_praised_even_when_host_stages_were_long() -> None:
    """Stages overlap: much work on the host is no fault while the engine never waits for it."""
    assert "the host is not the bottleneck" in advise(replace(GOOD, times=replace(QUIET, prepare=95.0)))


def test_less_computing_gains_nothing_where_the_host_would_not_keep_up() -> None:
    padded = replace(
        GOOD, padding_efficiency=0.6, causes={"real": 58, "padding": 39}, mean_cost=9.0, times=replace(QUIET, load=97.0)
    )
    assert "padding" not in advise(padded)


def said(report: Report, words: str) -> re.Match[str]:
    advice = spelled(report.advice, "flags")
    found = re.search(words, advice)
    assert found is not None, advice
    return found


BUSY_AND_SAVED = r"would bring busy to about (\d+)% and save ([\d.,]+) s of ([\d.,]+) s"


def check_promise(before: Report, after: Report) -> None:
    """The run after the change is as busy, and as much shorter, as the advice has said."""
    busy, saved, wall = (float(number.replace(",", "")) for number in said(before, BUSY_AND_SAVED).groups())
    assert wall == pytest.approx(before.wall_s, abs=0.5)
    assert 100 * after.busy == pytest.approx(busy, abs=4)
    assert before.wall_s - after.wall_s == pytest.approx(saved, abs=0.05 * before.wall_s)


def test_more_workers_where_preparing_is_the_bottleneck() -> None:
    job = Simulation(prepare_s=0.005)
    before = job.run()
    assert before.busy < 0.45
    workers = int(said(before, r"--workers (\d+) would").group(1))
    assert workers == 3
    check_promise(before, changed(job, workers=workers).run())


def test_a_machine_without_more_cores_is_said_to_be_too_small() -> None:
    job = Simulation(prepare_s=0.005, cores=1)
    before = job.run()
    cores = int(said(before, r"a machine with (\d+) cores would").group(1))
    check_promise(before, changed(job, workers=cores, cores=cores).run())


def test_a_faster_input_where_reading_is_the_bottleneck() -> None:
    job = Simulation(read_s=0.005)
    before = job.run()
    said(before, r"% waiting for the input: reading gives 200 records/s, the engine takes 500;")
    check_promise(before, changed(job, read_s=0.0001).run())


def test_no_delay_where_the_batcher_waits_for_company() -> None:
    job = Simulation(delay_s=0.05)
    before = job.run()
    said(before, r"batch_delay_s=0")
    check_promise(before, changed(job, delay_s=0.0).run())


@pytest.mark.parametrize(
    ("host", "setting", "value"),
    [
        (RunFacts(finishes=True, text_output=True), "--worker-kind", "process"),
        (RunFacts(text_output=True), "--output-file", ".parquet"),
        (RunFacts(), "", ""),
    ],
)
def test_cheaper_finishing_where_the_job_waits_for_it(host: RunFacts, setting: str, value: str) -> None:
    job = Simulation(finish_s=0.006, host=host)
    before = job.run()
    assert (before.advices[0].setting, before.advices[0].value) == (setting, value)
    check_promise(before, changed(job, finish_s=0.0001).run())


def test_more_memory_where_neither_finishing_nor_writing_keeps_the_job_waiting() -> None:
    job = Simulation(room_wait_s=0.05, host=RunFacts(buffer_memory=1_000_000))
    before = job.run()
    assert before.causes["memory"] > 1
    assert (before.advices[0].setting, before.advices[0].value) == ("--buffer-memory", "64000000")
    check_promise(before, changed(job, room_wait_s=0.0).run())


def test_faster_storage_where_the_job_waits_for_the_disk() -> None:
    job = Simulation(write_s=0.006)
    before = job.run()
    said(before, "waiting for results to be written")
    check_promise(before, changed(job, write_s=0.0001).run())


SAVED = r"save (?:about|up to) ([\d.,]+) s of"


def check_saved(before: Report, after: Report, *, at_most: bool) -> None:
    saved = float(said(before, SAVED).group(1).replace(",", ""))
    found = before.wall_s - after.wall_s
    assert found >= 0.7 * saved
    assert at_most or found == pytest.approx(saved, abs=0.05 * before.wall_s)


def test_larger_batches_where_each_takes_long_whatever_is_in_it() -> None:
    job = Simulation(record_s=0.001, fixed_s=0.1)
    before = job.run()
    size = int(said(before, r"; --batch-size (\d+) would save|: --batch-size (\d+) would save").group(2))
    assert before.advices[0].value == str(size)
    assert size == 16 * job.batch_size  # as far as these batches tell
    check_saved(before, changed(job, batch_size=size).run(), at_most=False)


def test_smaller_batches_where_much_of_what_is_computed_is_padding() -> None:
    job = Simulation(padding=0.4)
    before = job.run()
    said(before, "40% of what the engine computed was padding: --batch-size ")
    check_saved(before, changed(job, padding=0.0).run(), at_most=True)


def test_smaller_batches_where_they_run_out_of_memory() -> None:
    job = Simulation(out_of_memory_above=30)
    before = job.run()
    size = int(said(before, r"for lack of memory: --batch-size (\d+) would").group(1))
    assert 20 <= size <= 30
    check_saved(before, changed(job, batch_size=size).run(), at_most=True)


def test_equal_records_computed_once() -> None:
    job = Simulation(repeated=0.75)
    before = job.run()
    said(before, "75% of the records are equal to an earlier one and were computed again: --dedupe")
    after = changed(job, dedupe=True).run()
    check_saved(before, after, at_most=False)
    assert "--dedupe" not in [advice.setting for advice in after.advices]


def test_more_workers_than_cores_where_preparing_waits() -> None:
    job = Simulation(prepare_s=0.006, cores=1, cpu_share=0.02)
    before = job.run()
    workers = int(said(before, r"--workers (\d+) would").group(1))
    assert workers == 4
    check_promise(before, changed(job, workers=workers).run())


def test_processes_where_python_runs_one_thread_at_a_time() -> None:
    """Four threads take four times as long as one would."""
    job = Simulation(prepare_s=0.02, workers=4, cores=4, cpu_share=0.25, host=RunFacts(maps=True))
    before = job.run()
    assert (before.advices[0].setting, before.advices[0].value) == ("--worker-kind", "process")
    check_promise(before, changed(job, prepare_s=0.005, cpu_share=1.0).run())


MEASURED = {"read_s": 12e-6, "prepare_s": 66e-6, "finish_s": 1e-6, "write_s": 1e-6}
"""Seconds of a record: all that the job does under Python's lock, and tokenizing on a core of its own."""


def test_the_processes_that_prepare_for_a_device_of_50_000_records_a_second() -> None:
    one = RunFacts(preparers=1)
    job = Simulation(400_000, **MEASURED, record_s=1 / 50_000, batch_size=512, cores=16, host=one)
    before = job.run()
    assert before.busy < 0.35
    processes = int(said(before, r"--prepare-processes (\d+) would").group(1))
    assert processes == 4
    after = changed(job, workers=processes, host=RunFacts(preparers=processes)).run()
    assert after.busy >= 0.95
    assert re.search(r"time: prepare .* of wall, in 4 processes$", as_text(after), re.MULTILINE)
    check_promise(before, after)


def test_processes_where_threads_wait_for_the_lock_to_prepare() -> None:
    job = Simulation(prepare_s=0.02, workers=4, cores=4, cpu_share=0.25, host=RunFacts(preparers=0))
    before = job.run()
    assert before.advices[0].setting == "--prepare-processes"
    assert int(before.advices[0].value) > 1


def generation(slots: int, records: int = 400, steps: int = 20, spread: int = 7) -> Report:
    """A job of a language model: a step takes 20 ms, and 1 ms for each of its records. Prompts take 1 ms a token."""
    builder = ReportBuilder(0.0, RunFacts(slots=slots))
    builder(JobStarted(None, records, 0, 0.0))
    at, number, left, active = 0.0, 0, records, [0] * 0
    while left or active:
        joined = min(slots - len(active), left)
        left, active = left - joined, active + [steps + (left + place) % spread for place in range(joined)]
        took = 0.02 + 0.001 * len(active)
        at += took
        ended = active.count(1)
        builder(StepDone(number, len(active), joined, ended, 0, 0, ended, took, 0.0, at))
        active, number = [more - 1 for more in active if more > 1], number + 1
    builder(PrefixCacheUsed(records, 0, records, at, records * steps, records * 0.001))
    builder(PartCommitted(0, records, 0, 0, at))
    builder(JobDone("finished", at))
    return builder.build()


@pytest.mark.parametrize("spread", [7, 1], ids=["steps of several sizes", "all steps full"])
def test_more_slots_where_each_step_takes_long_whatever_is_in_it(spread: int) -> None:
    before = generation(4, spread=spread)
    slots = int(said(before, r"--max-num-seqs (\d+) would").group(1))
    assert slots == 16
    check_saved(before, generation(slots, spread=spread), at_most=False)


@pytest.mark.parametrize(("devices", "value", "prepare_s"), [(2, 2, 0.0005), (8, 8, 0.00001), (8, 4, 0.0005)])
def test_an_engine_for_each_device_where_the_device_is_the_limit(devices: int, value: int, prepare_s: float) -> None:
    job = Simulation(prepare_s=prepare_s, read_s=prepare_s, cores=1, host=RunFacts(replicas=devices))
    before = job.run()
    assert (before.advices[0].setting, before.advices[0].value) == ("--data-parallel-size", str(value))
    check_saved(before, changed(job, replicas=value).run(), at_most=False)


@pytest.mark.parametrize(("now", "most", "value"), [(1, 2, 2), (2, 3, 3)])
def test_another_worker_where_all_workers_are_busy(now: int, most: int, value: int) -> None:
    host = RunFacts(replicas=most, replicas_setting="replicas")
    job = Simulation(replicas=now, on_workers=True, prepare_s=0.0001, read_s=0.0001, host=host)
    before = job.run()
    assert (before.advices[0].setting, before.advices[0].value) == ("--replicas", str(value))
    after = changed(job, replicas=value).run()
    check_saved(before, after, at_most=False)
    assert "``replicas=" not in after.advice
    assert "another worker, on a device of the same speed, would save" in after.advice


def test_two_jobs_at_once_where_the_model_is_too_small_for_its_device() -> None:
    """Most of a batch is launching, which a second job can do meanwhile; larger batches are no faster."""
    used = DeviceUsed(8.0, 1e12, 0.0, 1e13, 0.0, "float16", 0.0)
    job = Simulation(record_s=0.0005, fixed_s=0.08, read_s=0.0001, prepare_s=0.0001, device=used)
    job = changed(job, closed_by="full_cost")
    assert "``batch_size=" in job.run().advice, "larger batches are to be tried first"
    small = changed(job, device=replace(used, computed_s=job.run().times.inference), larger_pay=False)
    before = small.run()
    assert (before.advices[0].setting, before.advices[0].value) == ("--shard", "0/2")
    check_saved(before, changed(small, replicas=2).run(), at_most=True)


def language_model(cached: float, compared: PromptsCompared, host: RunFacts | None = None) -> Report:
    """A job whose engine reads 1,000 prompts of 1,000 tokens at 50 us each, beside 20 s of answers."""
    builder = ReportBuilder(0.0, host)
    reading_s = 1_000_000 * (1 - cached) * 50e-6
    builder(JobStarted(None, 1_000, 0, 0.0))
    builder(compared)
    ended = reading_s + 20.0
    for number in range(100):
        at, took = ended * (number + 1) / 100, ended / 100
        builder(StepDone(number, 10, 10, 10, 0, 0, 10_000, took, 0.0, at))
        read = round(10_000 * cached)
        builder(PrefixCacheUsed(10_000, read, 10_000 - read, at, 100, reading_s / 100))
    builder(PartCommitted(0, 1_000, 0, 0, ended))
    builder(JobDone("finished", ended))
    return builder.build()


def test_another_order_of_fields_where_prompts_begin_with_what_differs() -> None:
    before = language_model(0.0, PromptsCompared(0.0, 0.8, "{document}\n{question}", 0.0))
    assert (before.advices[0].setting, before.advices[0].value) == ("--prompt-template", "{document}\n{question}")
    said(
        before, r"--prompt-template \$'\{document\}\\n\{question\}', its fields in the order document, question, would"
    )
    after = language_model(0.8, PromptsCompared(0.8, 0.8, None, 0.0))
    check_saved(before, after, at_most=False)
    assert not after.advices


def test_the_order_of_the_prompts_where_the_user_wanted_that_of_the_input() -> None:
    compared = PromptsCompared(0.6, 0.6, None, 0.0)
    before = language_model(0.1, compared, RunFacts(keeps_order=True))
    assert (before.advices[0].setting, before.advices[0].value) == ("--order", "auto")
    check_saved(before, language_model(0.6, compared), at_most=False)
    assert not language_model(0.1, compared).advices, "the job has chosen its order itself"


def test_what_a_second_device_would_bring_is_said_where_there_is_one() -> None:
    job = Simulation()
    before = job.run()
    check_saved(before, changed(job, replicas=2).run(), at_most=False)
    host_bound = Simulation(prepare_s=0.00199, cores=1).run()
    assert "second device" not in host_bound.advice


def test_nothing_is_said_to_be_wrong_with_a_good_job() -> None:
    report = Simulation().run()
    assert report.busy > 0.97
    assert report.advices == ()
    assert "use a faster device" in report.advice
