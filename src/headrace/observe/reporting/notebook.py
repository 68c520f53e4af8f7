"""A report in a notebook: as HTML, and as Arrow tables."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.io.sources.opening import open_source
from headrace.observe.accounting.timeline import CAUSES, COLOURS, LABELS
from headrace.observe.reporting.table import rows

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.events import RecordFailed
    from headrace.observe.accounting.accountant import Account
    from headrace.observe.reporting.run_figures import Report

logger = logging.getLogger("headrace")

_BATCH_COLUMNS = ("start_s", "duration_s", "records", "cost", "padded_cost", "failed", "close_reason")


def as_html(report: Report) -> str:
    """The report as HTML without scripts: what the device's time went into, the figures, and the advice."""
    whole = sum(report.causes.values())
    shares = [(cause, report.causes.get(cause, 0.0) / whole) for cause in CAUSES] if whole > 0 else []
    bar = "".join(
        f'<span title="{escape(LABELS[cause])} {share:.1%}" style="width:{100 * share:.3f}%;'
        f'background:{COLOURS[cause]}"></span>'
        for cause, share in shares
        if share > 0
    )
    legend = ", ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:.7em;height:.7em;'
        f'background:{COLOURS[cause]}"></span> {escape(LABELS[cause])} {share:.1%}</span>'
        for cause, share in sorted(shares, key=lambda one: -one[1])
        if share >= 0.001
    )
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows(report)
    )
    return (
        f"<div><b>headrace: {escape(report.state)}</b>"
        f'<div style="display:flex;height:1.2em;max-width:60em;margin:.4em 0">{bar}</div>'
        f'<p style="max-width:60em">{legend}</p><table>{cells}</table><p>{escape(report.advice)}</p></div>'
    )


def batches_table(account: Account, batches: int) -> pa.Table:
    """The first 300 and the last 300 of all batches, one per row. Times are in seconds since the job began.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as arrow

    boxes: Sequence[Sequence[object]] = account.batches
    _tell_left_out(len(boxes), batches, "batches, the first and the last ones")
    columns = list(zip(*boxes, strict=True)) or [()] * len(_BATCH_COLUMNS)
    kinds = (arrow.float64(), arrow.float64(), arrow.int64(), arrow.float64(), arrow.float64(), arrow.int64(),
             arrow.string())  # fmt: skip
    return arrow.table(
        [arrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names=list(_BATCH_COLUMNS)
    )


def failures_table(kept: Sequence[RecordFailed], failed: int) -> pa.Table:
    """Failed records, one a row. Raises ModuleNotFoundError: pyarrow is not installed."""
    import pyarrow as arrow

    _tell_left_out(len(kept), failed, "failed records, the first ones")
    return arrow.table(
        {
            "position": arrow.array([one.position for one in kept], arrow.int64()),
            "reason": arrow.array([one.reason for one in kept], arrow.string()),
            "message": arrow.array([one.message for one in kept], arrow.string()),
        }
    )


def records_table(output: str, errors: str | None, most: int, done: int) -> pa.Table:
    """The first `most` rows of an output, and then the first `most` failed records, of `done` records.

    Raises:
        ConfigError: the output cannot be read.
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as arrow

    read = (record.data for chunk in open_source(output).chunks(lambda position: position) for record in chunk.records)
    rows: list[dict[str, object]] = [{**row, "error": None} for row in itertools.islice(read, most)]
    failed = 0
    with Path(errors).open(encoding="utf-8") if errors is not None else contextlib.nullcontext(()) as lines:
        for letter in map(json.loads, itertools.islice(lines, most)):
            rows.append({"id": letter["id"], "error": f"{letter['reason']}: {letter['message']}"})
            failed += 1
    _tell_left_out(len(rows), done, f"records, the first finished ones and {failed:,} failed ones")
    if len({type(row["id"]) for row in rows if row.get("id") is not None}) > 1:
        rows = [{**row, "id": str(row.get("id"))} for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name != "error")
    table = arrow.table({name: arrow.array([row.get(name) for row in rows]) for name in names})
    return table.append_column("error", arrow.array([row["error"] for row in rows], arrow.string()))


def _tell_left_out(kept: int, of: int, what: str) -> None:
    if kept < of:
        logger.warning("headrace: the table holds %s of %s %s", f"{kept:,}", f"{of:,}", what)


def over_time_table(account: Account) -> pa.Table:
    """What happened over time, one moment a row: seconds of the device by cause, records, failed records and cost.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as arrow

    length = max((len(row) for row in account.bins.values()), default=0)
    columns = {"start_s": [place * account.bin_s for place in range(length)]}
    for name in (*CAUSES, "records", "failed", "cost"):
        row = list(account.bins.get(name, ()))
        columns[name] = row + [0.0] * (length - len(row))
    return arrow.table({name: arrow.array(values, arrow.float64()) for name, values in columns.items()})
