"""The page and its file: what is in them, hostile text included."""

from __future__ import annotations

import copy
import functools
import html.parser
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.observe.simulated import Simulation

from headrace.errors import ConfigError
from headrace.events import MemoryUsed, OrderChosen, PrefixCacheUsed, RecordFailed, WorkUnitDone
from headrace.observe.accounting.device_limit import DeviceFigures
from headrace.observe.accounting.timeline import LABELS
from headrace.observe.page import render as render_module
from headrace.observe.page.charts import charts
from headrace.observe.page.render import ReportedJob, _job, render, write_page
from headrace.observe.reporting import summary
from headrace.observe.reporting.figure import declared, lines_of
from headrace.observe.reporting.job_figures import JobFigures, figures, in_json, series
from headrace.observe.reporting.report import ReportBuilder
from headrace.observe.reporting.run_figures import Report
from headrace.observe.reporting.summary import RunSummary

HOSTILE = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"


def run_of(simulation: Simulation, *, started_at: float = 0.0, reason: str = "", **texts: str) -> RunSummary:
    builder = ReportBuilder(0.0)
    for event in sorted(simulation._events(), key=lambda event: getattr(event, "at", 0.0)):
        builder(event)
    if reason:
        builder(RecordFailed(1, reason, "no"))
    report = builder.build(0.0)
    return RunSummary(started_at, "finished", summary.figures_of(report), report.account, texts, {"headrace": "1"})


@pytest.fixture(scope="module")
def run() -> RunSummary:
    return run_of(Simulation(prepare_s=0.005), model="m")


def written(path: Path, *runs: RunSummary) -> Path:
    summary.write(path, [run.as_json() for run in runs])
    return path


def test_a_summary_is_read_as_it_was_written(tmp_path: Path, run: RunSummary) -> None:
    (found,) = summary.read(written(tmp_path / "report.json", run))
    assert (found.state, found.settings) == (run.state, run.settings)
    assert found.account.causes == run.account.causes
    assert json.dumps(in_json([found], 2.0)) == json.dumps(in_json([run], 2.0))


def test_the_first_of_many_runs_are_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    every = [run_of(Simulation(records=100 + number), started_at=number) for number in range(12)]
    kept: list[RunSummary] = []
    for run in every:  # as one run after the other writes it
        written(path, *summary.kept(kept), run)
        kept = summary.read(path)
    assert [(run.started_at, run.runs) for run in kept] == [(0, 5), *((number, 1) for number in range(5, 12))]
    whole, now = figures(every), figures(kept)
    assert (now.runs, now.ok, now.batches, now.peak_memory) == (12, whole.ok, whole.batches, whole.peak_memory)
    assert now.causes == pytest.approx(whole.causes)
    assert now.stages == pytest.approx(whole.stages)
    assert now.percentiles == whole.percentiles
    assert (now.close_reasons, now.failures) == (whole.close_reasons, whole.failures)
    page = render([ReportedJob("out.jsonl", "finished", kept)])
    assert "12 runs together" in page
    assert "the first 5 are in the sums and not in the charts over time" in page
    assert path.stat().st_size < 1e6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not as a job writes it"),
        ("[]", "it is not a report"),
        ('{"format": "headrace-report", "version": 2, "runs": []}', "its version is 2"),
        ('{"format": "headrace-report", "version": 1, "runs": [{}]}', "not as a job writes it"),
        ("[" * 100_000, "not as a job writes it"),
        ('{"format": "headrace-report", "version": 1, "runs": 7}', "not as a job writes it"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        summary.read(path)
    assert str(path) in str(error.value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in parsed JSON: of lists, the first element stands for all."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


@pytest.mark.parametrize("wrong", [None, "text", -1, [], {}, [[]], {"a": None}, "gone"], ids=repr)
def test_a_damaged_file_is_named_or_does_no_harm(tmp_path: Path, wrong: object) -> None:
    builder = ReportBuilder(0.0)
    for event in Simulation(records=200)._events():
        builder(event)
    builder(WorkUnitDone("w", 10, 0, 1, 0.5, 2.0))
    builder(MemoryUsed(10, 20, "the machine", 2.0))
    report = builder.build(0.0)
    whole = json.loads(
        RunSummary(0.0, "finished", summary.figures_of(report), report.account, {"a": "b"}, {}).as_json()
    )
    path = tmp_path / "report.json"
    refused = 0
    for place in list(places(whole))[1:]:
        content = copy.deepcopy(whole)
        within = functools.reduce(operator.getitem, place[:-1], content)
        if wrong == "gone":
            del within[place[-1]]
        else:
            within[place[-1]] = wrong
        path.write_text(json.dumps({"format": "headrace-report", "version": 1, "runs": [content]}))
        try:
            runs = summary.read(path)
        except ConfigError:
            refused += 1
        else:
            found = figures(runs)
            json.dumps([in_json(runs, 1.0), charts(runs, found)])
            _job(0, ReportedJob("a", "finished", runs), 1.0)
    assert refused > 30


def test_times_that_are_none_are_refused(tmp_path: Path, run: RunSummary) -> None:
    path = written(tmp_path / "report.json", run)
    content = json.loads(path.read_text())
    content["runs"][0]["account"]["causes"]["real"] = float("nan")
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="a number is not valid"):
        summary.read(path)


def test_figures_and_money_add_up_over_runs(run: RunSummary) -> None:
    one, two = figures([run]), figures([run, run])
    assert sum(two.causes.values()) == pytest.approx(two.wall_s) == pytest.approx(2 * one.wall_s)
    assert (two.ok, two.records_per_s, two.busy) == (2 * one.ok, pytest.approx(one.records_per_s), one.busy)
    money = two.money(3_600)
    assert money.total == pytest.approx(two.wall_s) == pytest.approx(sum(money.causes.values()))
    assert money.per_million_records == pytest.approx(two.wall_s / two.ok * 1e6)
    assert one.sequential_s == pytest.approx(1 + 4_000 * (0.0005 + 0.005 + 0.002 + 0.0002))
    width, bins = series([run, run])
    assert len(bins) <= 302
    assert sum(sums.get("real", 0) for sums in bins) == pytest.approx(two.causes["real"])
    assert width >= run.account.bin_s


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = run_of(Simulation(records=200), reason=HOSTILE, model=HOSTILE)
    page = render([ReportedJob(HOSTILE, "finished", [hostile])], 2.0)
    found = _Elements()
    found.feed(page)
    assert found.names.count("script") == 4  # specifications, configuration, library, and what draws
    assert "img" not in found.names
    assert sum(text.strip() == HOSTILE for text in found.texts) >= 3  # the name, the reason and the model, as they are
    assert "49" not in "".join(text for text in found.texts if "7 * 7" in text)


def test_a_page_needs_no_network_and_is_small(run: RunSummary) -> None:
    page = render([ReportedJob("out.jsonl", "finished", [run])])
    assert len(page) < 3e6
    assert "default-src 'none'" in page
    found = _Elements()
    found.feed(page)
    assert found.addresses == []
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_charts_are_drawn_of_whatever_there_is(run: RunSummary) -> None:
    assert {"causes", "over-time", "timeline", "stages", "throughput", "size", "cost"} <= charts(
        [run], figures([run])
    ).keys()
    empty = summary.summarize(ReportBuilder(0.0).build(0), "running", 0.0, {}, {})
    assert charts([empty], figures([empty])) == {}
    assert "No record failed" in render([ReportedJob("out.jsonl", "running", [empty])], 1.0)


def test_a_long_run_shows_its_first_and_its_last_batches() -> None:
    run = run_of(Simulation(records=60_000, batch_size=20))
    drawn = charts([run], figures([run]))
    assert {"timeline", "timeline-end"} <= drawn.keys()
    boxes = [row for row in drawn["timeline-end"]["data"]["values"] if row["lane"] == "device"]
    assert 100 <= len(boxes) <= 130
    assert max(row["to"] for row in boxes) == pytest.approx(run.account.wall_s, rel=0.01)
    assert len(render([ReportedJob("a", "finished", [run])])) < 3e6


def test_two_jobs_stand_side_by_side(run: RunSummary) -> None:
    faster = run_of(Simulation(prepare_s=0.005, workers=3))
    page = render([ReportedJob("a.jsonl", "finished", [run]), ReportedJob("b.jsonl", "finished", [faster])])
    assert "Side by side" in page
    assert re.search(
        r"<td>device busy after the start</td><td class=\"n\">39\.\d %</td><td class=\"n\">9\d\.\d %</td>", page
    )


def test_advice_that_the_last_job_has_followed_is_not_on_the_page(run: RunSummary) -> None:
    followed = run_of(Simulation(prepare_s=0.005, workers=3))
    assert "a machine with 3 cores" in run.figures.advice
    page = render([ReportedJob("before", "finished", [run]), ReportedJob("after", "finished", [followed])])
    assert "What to change in after" in page
    assert "a machine with 3 cores" not in page.partition("<script")[0]
    assert "a machine with 3 cores" in render([ReportedJob("before", "finished", [run])]).partition("<script")[0]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, run: RunSummary) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*/none/page.html"):
        write_page(tmp_path / "none" / "page.html", [ReportedJob("a", "finished", [run])])


def test_the_docs_explain_every_figure_of_the_page(run: RunSummary) -> None:
    package = Path(render_module.__file__).parent
    template = (package / "templates" / "report.html.j2").read_text(encoding="utf-8")
    device = DeviceFigures(0.5, 1.0, 1.0, 0.5, "host", "float16", 1.0, 1.0, 1.0, 0.5)
    order = (OrderChosen("input", 1, "", 0.0),)
    found = Report(batches=1, device=device, order=order, duplicates=1, prefix_cache=PrefixCacheUsed(1, 1, 1, 0.0))
    shown = {
        *(label.partition(" (")[0] for label in LABELS.values()),
        *re.findall(r'^  \("[a-z-]+", "([^"]+)"', template, re.MULTILINE),
        *(title for title in re.findall(r"<h3>([^<]+)</h3>", template) if "{{" not in title),
        *(label.partition("{")[0].rstrip(" ,(") for label in re.findall(r"</b><span>(.+?)</span>", template)),
        *(one.label for one in declared(JobFigures)),
        *(label for label, _ in lines_of(found, "device", "order", "duplicates", "prefix_cache")),
        *(what.partition(" (")[0] for what in figures([run]).percentiles),
    }
    assert len(shown) > 40
    docs = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8").lower()
    docs = " ".join(docs.replace("*", "").split())
    assert [label for label in sorted(shown) if label.lower() not in docs] == []
