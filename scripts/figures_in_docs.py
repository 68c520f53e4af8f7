#!/usr/bin/env python
"""Write the tables of figures in docs/report.md, from where the figures are declared."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.cli.app import declare_settings
from headrace.observe.accounting.timeline import CAUSE_FACTS
from headrace.observe.reporting.figure import as_markdown, markdown
from headrace.observe.reporting.job_figures import JobFigures, Money
from headrace.observe.reporting.run_figures import Report

declare_settings()  # which the tables name by their flags
PAGE = Path(__file__).resolve().parents[1] / "docs" / "report.md"


def causes() -> str:
    """The table of causes."""
    rows = [(one.label.partition(" (")[0], one.meaning, one.what_to_do) for one in CAUSE_FACTS.values()]
    return markdown(("cause", "meaning", "what to do"), rows)


def filled(page: str) -> str:
    """The page with its tables as they are declared."""
    tables = {
        "the lines of a report": as_markdown(Report),
        "the figures of a page": as_markdown(JobFigures, Money),
        "the causes": causes(),
    }
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(\n<!-- end -->)", re.DOTALL)
        page, found = pattern.subn(lambda match, table=table: match[1] + table + match[2], page)
        if found != 1:
            raise SystemExit(f"{PAGE} has {found} places for {name}; it must have one")
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
