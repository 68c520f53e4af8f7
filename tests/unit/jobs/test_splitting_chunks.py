"""A chunk in pieces: unreadable rows come with those that they stand among, so that no piece looks worse than it is."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.io.base import ColumnSource
from headrace.io.sources.opening import open_source
from headrace.jobs.pipeline.read import Pace, portions


def test_failures_come_with_the_rows_around_them(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = ("broken" if n % 10 == 3 else json.dumps({"id": n, "text": f"text {n}"}) for n in range(2_000))
    file.write_text("".join(f"{line}\n" for line in lines))
    source = open_source(file)
    assert isinstance(source, ColumnSource)
    chunks = list(source.in_columns(("id", "text")).chunks(lambda position: position))
    assert chunks[0].table is not None and len(chunks[0].records) > 900
    seen = 0
    pieces = list(portions(iter(chunks), Pace(300, 300), lambda: 0.0))
    assert len(pieces) >= 6
    for piece in pieces:
        positions = [record.position for record in piece.records]
        positions += [failed.record.position for failed in piece.failures]
        assert sorted(positions) == list(range(seen, seen + len(positions)))
        seen += len(positions)
    assert seen == 2_000
    assert sum(piece.bytes for piece in pieces) == file.stat().st_size
    assert all(not piece.bytes or len(piece.records) <= 300 for piece in pieces)
