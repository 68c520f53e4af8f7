"""Writes the page: figures and charts in a template, with the chart library inside. No network is needed to read it."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.extras import require
from headrace.observe.accounting.timeline import CAUSES, COMPUTING, LABELS
from headrace.observe.page.charts import CONFIG, charts
from headrace.observe.reporting.figure import Figure, declared, lines_of
from headrace.observe.reporting.formats import money, number, percent, seconds
from headrace.observe.reporting.job_figures import Held, JobFigures, figures
from headrace.observe.reporting.summary import RunSummary

if TYPE_CHECKING:
    import jinja2
    import markupsafe

_FLAG = re.compile(r"(--[a-z][a-z-]*(?: [\w.]+(?= would))?)")


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """A job on the page."""

    name: str
    """What the user calls it."""
    state: str
    """Such as "finished" or "running, by process 7"."""
    runs: Sequence[RunSummary]
    """At least one."""
    held: Held | None = None
    """The records in its output; None if it has none, or for a single run."""


def check_installed() -> None:
    """Check that the page can be drawn. Raises MissingExtraError: a library is missing."""
    for library in ("jinja2", "vl_convert"):
        require(library, "report", "the report page")


def write_page(path: Path, jobs: Sequence[ReportedJob], price: float | None = None) -> None:
    """Write the page of one job, or of several side by side.

    Args:
        path: of the file, which is replaced.
        price: of one hour of the device; None for a page without money.

    Raises:
        MissingExtraError: a library is missing.
        ConfigError: the file cannot be written.
    """
    page = render(jobs, price)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def render(jobs: Sequence[ReportedJob], price: float | None = None) -> str:
    found = environment()
    shown = [_job(number, job, price) for number, job in enumerate(jobs)]
    specs = {f"{name}-{job['number']}": spec for job in shown for name, spec in job["charts"].items()}
    return found.get_template("report.html.j2").render(
        jobs=shown,
        compared=_compared([job["figures"] for job in shown]),
        causes=[(cause, LABELS[cause]) for cause in CAUSES],
        price=price,
        specs=script_json(specs),
        config=script_json(CONFIG),
        library=library(),
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    )


def environment() -> jinja2.Environment:
    """What fills in the templates. It escapes all values. Raises MissingExtraError: a library is missing."""
    check_installed()
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("headrace.observe.page", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["number"] = number
    found.filters["seconds"] = seconds
    found.filters["money"] = money
    found.filters["flags"] = _flags
    return found


def _job(number: int, job: ReportedJob, price: float | None) -> dict[str, Any]:
    found = figures(job.runs, job.held)
    last = job.runs[-1]
    return {
        "number": number,
        "name": job.name,
        "state": job.state,
        "runs": found.runs,
        "summed": job.runs[0].runs if job.runs[0].runs > 1 else 0,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.runs[0].started_at)),
        "figures": found,
        "rows": [(cause, LABELS[cause], seconds) for cause in CAUSES if (seconds := found.causes[cause]) > 0],
        "computing": COMPUTING,
        "money": None if price is None else found.money(price),
        "headline": list(lines_of(found)),
        "advice": last.figures.advice,
        "advices": last.figures.advices,
        "truncated": sum(run.figures.truncated for run in job.runs),
        "skipped": last.figures.skipped,
        "device": list(lines_of(last.figures, "device")),
        "savings": list(lines_of(last.figures, "order", "duplicates", "prefix_cache")),
        "lanes": last.figures.lanes,
        "settings": last.settings,
        "versions": last.versions,
        "charts": charts(job.runs, found),
    }


def _compared(every: Sequence[JobFigures]) -> list[tuple[str, list[str], str]]:
    """The main figures of several jobs: what, its value in each, and how the last differs from the first."""
    if len(every) < 2:
        return []
    rows = [
        (one.label, [one.text(job) for job in every], _change(every, one))
        for one in declared(JobFigures)
        if one.text is not None and any(getattr(job, one.name) for job in every)
    ]
    shares = [(LABELS[cause], [job.causes[cause] / max(job.wall_s, 1e-9) for job in every]) for cause in CAUSES]
    return rows + [(label, list(map(percent, each)), _points(each[0], each[-1])) for label, each in shares if any(each)]


def _change(every: Sequence[JobFigures], one: Figure) -> str:
    before, after = getattr(every[0], one.name), getattr(every[-1], one.name)
    if one.unit == "fraction":
        return _points(before, after)
    return f"{after / before - 1:+.0%}" if before else ""


def _points(before: float, after: float) -> str:
    return f"{round(100 * (after - before), 1) + 0.0:+.1f} points"  # + 0.0: not "-0.0"


def script_json(value: object) -> markupsafe.Markup:
    """JSON that cannot end the script element that holds it."""
    import markupsafe

    text = json.dumps(value, separators=(",", ":"))
    return markupsafe.Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@functools.cache
def library() -> markupsafe.Markup:
    """Vega, Vega-Lite and vega-embed as one script."""
    import markupsafe
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return markupsafe.Markup(script.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _flags(text: str) -> object:
    """Text with each flag in it as code, which no line break divides."""
    import markupsafe

    parts = _FLAG.split(text)
    code = markupsafe.Markup("<code>{}</code>")
    return markupsafe.Markup("").join(code.format(part) if place % 2 else part for place, part in enumerate(parts))
