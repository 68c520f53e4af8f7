"""docs/clients.md names the clients that the tests run, with their versions."""

from __future__ import annotations

import json

import pytest
from tests.acceptance.command import ROOT

PYTHON = [
    tuple(line.split("#")[0].strip().split("=="))
    for line in (ROOT / "requirements" / "clients.txt").read_text().splitlines()
    if "==" in line
]
NODE = list(json.loads((ROOT / "requirements" / "clients.json").read_text())["dependencies"].items())


@pytest.mark.parametrize(("name", "version"), [*PYTHON, *NODE])
def test_each_client_is_in_the_table(name: str, version: str) -> None:
    rows = [line for line in (ROOT / "docs" / "clients.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"`{name}` {version}" in row for row in rows)
