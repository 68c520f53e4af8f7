"""Print a report: a table on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from headrace.observe.reporting.figure import Line, lines_of
from headrace.wording import spelled

if TYPE_CHECKING:
    from headrace.observe.reporting.run_figures import Report


def print_report(report: Report, stream: TextIO) -> None:
    """Write `report` to `stream`, with rich if it is a terminal and rich is installed; nothing to a quiet one."""
    if getattr(stream, "quiet", False):
        return
    if getattr(stream, "as_json", False):
        said: Any = stream  # it writes objects
        said.emit("info", _title(report), report=dict(rows(report)), advice=spelled(report.advice))
        return
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            console = Console(file=stream)
            table = Table("", "", title=_title(report), show_header=False, title_justify="left")
            for name, value in rows(report):
                table.add_row(name, value)
            console.print(table)
            console.print(spelled(report.advice), highlight=False)
            return
    stream.write(as_text(report))


def as_text(report: Report) -> str:
    """The report as aligned lines, the advice last."""
    lines = rows(report)
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        [_title(report), *(f"  {name:<{width}}  {value}" for name, value in lines), spelled(report.advice), ""]
    )


def rows(report: Report, *names: str) -> list[Line]:
    """Label and text of each line, or of those of the named figures; empty lines are left out."""
    return [(label, spelled(text)) for label, text in lines_of(report, *names)]


def _title(report: Report) -> str:
    return f"headrace run: {report.state}"
