"""The table of docs/clients.md is the one of the clients that the tests run."""

from __future__ import annotations

from tests.acceptance.clients.table import CLIENTS, PAGE, page
from tests.acceptance.clients.test_clients import PROGRAMS


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(), "run tests/acceptance/clients with scripts/install-clients: it writes the table"


def test_each_program_is_in_the_table() -> None:
    programs = {path.name for path in PROGRAMS.glob("use_*")}
    assert {one.program for one in CLIENTS} == programs
