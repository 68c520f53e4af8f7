"""The tables of docs/report.md are those of the declarations, and one line is enough for a new figure."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from scripts import figures_in_docs

from headrace.observe.reporting.figure import as_markdown, declared, figure, fill, lines_of


def test_the_tables_are_as_the_figures_are_declared() -> None:
    page = figures_in_docs.PAGE.read_text(encoding="utf-8")
    assert figures_in_docs.filled(page) == page, "run scripts/figures_in_docs.py"


def test_a_table_that_somebody_has_changed_is_noticed() -> None:
    page = figures_in_docs.PAGE.read_text(encoding="utf-8")
    changed = page.replace("| `wall` | ", "| `wall` | about the ")
    assert changed != page
    assert figures_in_docs.filled(changed) == page


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="0 places for the lines of a report"):
        figures_in_docs.filled("nothing")


@dataclass(frozen=True, slots=True)
class Table:
    seen: int = figure(0, "what was seen, see ``batch_size=2``", label="seen", text=lambda table: f"{table.seen} seen")
    twice: int = figure(0, "the same twice", of=lambda sums: 2 * sums.seen, label="twice", text=lambda table: "2 x")
    later: str = figure("", "filled in by a later step")


class Sums:
    seen = 3


def test_one_declaration_is_all_that_a_figure_needs() -> None:
    table = fill(Table, Sums())
    assert (table.seen, table.twice, table.later) == (3, 6, "")
    assert list(lines_of(table)) == [("seen", "3 seen"), ("twice", "2 x")]
    assert list(lines_of(table, "twice")) == [("twice", "2 x")]
    assert list(lines_of(Table())) == [], "what was not heard of has no line"
    assert [one.name for one in declared(Table)] == ["seen", "twice", "later"]
    assert "| `seen` | what was seen, see `--batch-size 2` |" in as_markdown(Table)
