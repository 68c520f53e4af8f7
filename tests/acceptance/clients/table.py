"""The table of docs/clients.md: each client that the tests run, with its version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.acceptance.command import ROOT

PAGE = ROOT / "docs" / "clients.md"


class Client(NamedTuple):
    """A row."""

    name: str
    """Empty for another package of the one above."""
    packages: tuple[str, ...]
    works: str
    address: str
    """How it is told the server's address."""
    program: str
    """Runs it, in `programs`."""
    beyond: str
    """What it needs beyond the address, a key and the name of a model."""


def _clients() -> tuple[Client, ...]:
    lines = Path(__file__).with_name("clients.txt").read_text().splitlines()
    rows = ([cell.strip().removeprefix("-") for cell in line.split(" | ")] for line in lines if line[0] != "#")
    return tuple(Client(name, tuple(packages.split(", ")), *others) for name, packages, *others in rows)


CLIENTS = _clients()


def page() -> str:
    """The page with the table as it must be."""
    text = PAGE.read_text()
    before, after = text.index("\n\n", text.index("# Clients\n\n") + 11), text.index("\n\n`scripts/install-clients`")
    head = text[: text.index("# Clients\n\n") + 11]
    plain = sum(not one.beyond for one in CLIENTS)
    summary = (
        "These clients were run, as their own documentation shows them, against `headrace serve` by "
        f"`tests/acceptance/clients`, which writes this table.\n{plain} of {len(CLIENTS)} need nothing beyond the "
        "address, a key, and the name of a model where they have none of their own."
    )
    assert before < after
    return f"{head}{summary}\n\n{_table()}{text[after:]}"


def _table() -> str:
    versions = _versions()
    lines = ["| client | version | works | what it needs |", "|---|---|---|---|"]
    for one in CLIENTS:
        named = ", ".join(f"`{name.removeprefix('node:')}` {versions[name]}" for name in one.packages)
        needs = "; ".join(filter(None, (one.address, one.beyond)))
        lines.append(f"| {one.name} | {named} | {one.works} | {needs} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    """The versions that scripts/install-clients installs; packages of Node also with `node:` before their names."""
    lines = (ROOT / "requirements" / "clients.txt").read_text().splitlines()
    pinned = [line.split("#")[0].split("==") for line in lines if "==" in line]
    node = json.loads((ROOT / "requirements" / "clients.json").read_text())["dependencies"]
    python = {name.split("[")[0]: version.strip() for name, version in pinned}
    return {**node, **python, **{f"node:{name}": version for name, version in node.items()}}
