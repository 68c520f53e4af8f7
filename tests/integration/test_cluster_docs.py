"""What docs/cluster.md, docs/flyte.md and docs/pool.md show is run, so that it cannot rot."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tests.acceptance.command import python, traced

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("cluster.md", "flyte.md", "pool.md")]
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\nprints\n\n```\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SHOWN = [example for page in PAGES for example in EXAMPLE.findall(page)]


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_examples_print_what_the_page_says(number: int, tmp_path: Path) -> None:
    code, printed = SHOWN[number]
    if "flyte" in code:
        pytest.importorskip("fastapi")
        if importlib.util.find_spec("flyte") is None:
            pytest.skip('needs Flyte: pip install "headrace[flyte]"')
    with traced(python(code, ["example"], folder=tmp_path, imported="light", HOME=str(tmp_path))) as example:
        assert example.communicate()[0] == printed


def test_the_links_lead_somewhere() -> None:
    assert len(SHOWN) == sum(page.count("\nprints\n") for page in PAGES)
    links = [link for page in PAGES for link in re.findall(r"\]\(([\w./-]+)[#)]", page)]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
