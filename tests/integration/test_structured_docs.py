"""What docs/structured.md shows is run, so that it cannot rot."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import headrace, python, traced
from tests.integration.test_tools import ADDED, TEMPLATES
from tests.small_models import chat_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\nprints\n\n```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=["ask again", "votes and judges"])
def test_an_example_prints_what_the_page_says(code: str, printed: str, tmp_path: Path) -> None:
    with traced(python(code, ["example"], folder=tmp_path, imported="models")) as example:
        assert example.communicate()[0] == printed


def test_rows_parse_as_the_page_says(tmp_path: Path) -> None:
    [line] = re.findall(r"^headrace .*--output-schema.*$", PAGE, flags=re.MULTILINE)
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    pq.write_table(pa.table({"text": ["Rain.", "Sun."]}), tmp_path / "reviews.parquet")
    model = chat_model(tmp_path / "model", TEMPLATES["hermes"], ADDED)
    arguments = shlex.split(line.replace("Qwen/Qwen3-8B", str(model)))[1:]
    status, said = headrace(*arguments, folder=tmp_path)
    assert status == 0, said
    parsed = [row["parsed"] for row in pq.read_table(tmp_path / "answers.parquet")["generation"].to_pylist()]
    assert [type(one["good"]) for one in parsed] == [bool, bool]


def test_tools_are_called_in_bulk_as_the_page_says(tmp_path: Path) -> None:
    [tools] = re.findall(r"^```json\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    [line] = re.findall(r"^headrace .*--tools.*$", PAGE, flags=re.MULTILINE)
    (tmp_path / "tools.json").write_text(tools, encoding="utf-8")
    rows = (json.dumps({"id": str(n), "text": f"{n}?"}) for n in range(3))
    (tmp_path / "questions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    model = chat_model(tmp_path / "model", TEMPLATES["hermes"] + "{# </think> #}", ADDED)
    arguments = shlex.split(line.replace("Qwen/Qwen3-8B", str(model)))[1:]
    more = ["--tool-choice", "weather", "--max-tokens", "100"]
    status, said = headrace(*arguments, *more, folder=tmp_path)
    assert status == 0, said
    table = pq.read_table(tmp_path / "calls.parquet")
    assert table.column_names == ["id", "text", "reasoning", "tool_calls", "tool_errors"]
    for calls in table["tool_calls"].to_pylist():
        assert calls[0]["function"]["name"] == "weather"
