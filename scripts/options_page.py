"""Write the tables of settings in docs/options.md and other pages from their declarations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from headrace.app.servers.settings import ServerSettings
from headrace.argument_types import parts
from headrace.cli import app as _all_commands  # noqa: F401 - declares the settings of all commands
from headrace.cli.bench import HowFlags, WhatFlags
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.inspect import CheckFlags
from headrace.cli.listing import ListFlags
from headrace.cli.logs import LogFlags
from headrace.cli.merge import FileFlags
from headrace.cli.report import PageFlags
from headrace.cli.run import ReportFlags
from headrace.cli.serve import AccessFlags, ReplicaFlags, ServerFlags
from headrace.cli.steps import StepFlags
from headrace.cli.top import LookFlags
from headrace.cli.tune import GridFlags
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import declared_engines
from headrace.engines.declaring import EngineOptions
from headrace.io.sources.selection import Selection
from headrace.jobs.settings import JobSettings, Limits
from headrace.options import Declared, declared
from headrace.plugins import OWN, known
from headrace.serving.limits import ServeLimits
from headrace.wording import spelled

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE = DOCS / "options.md"
FILES = (FILE, DOCS / "serving.md")
TABLES: dict[str, tuple[type, ...]] = {
    "job": (JobSettings, Selection, Limits),
    "engine": (EngineConfig,),
    "server": (ServerSettings, ServeLimits),
    "run": (ReportFlags, ClusterFlags, StepFlags, LogFlags),
    "serve": (ServerFlags, AccessFlags, ReplicaFlags, LogFlags),
    "tune": (GridFlags,),
    "bench": (WhatFlags, HowFlags),
    "report": (PageFlags,),
    "top": (LookFlags,),
    "inspect": (CheckFlags,),
    "merge": (FileFlags,),
    "list": (ListFlags,),
}
"""The tables of the page, each with the classes that declare its settings."""
PARTS = {
    "accepted": ("max_wait_s", "timeout_s", "max_waiting_bytes", "max_requests", "max_cost"),
    "one request": ("max_body_bytes", "max_prompts", "max_prompt_chars", "body_timeout_s", "write_timeout_s"),
}
"""Tables of some limits of a server."""
_MARKED = re.compile(r"(<!-- options: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page of this text with its tables as the declarations have them."""
    return _MARKED.sub(lambda found: f"{found[1]}{_table(found[2])}{found[3]}", text)


def _table(name: str) -> str:
    if name == "engines":
        return "".join(_of_engines())
    limits = {one.name: one for one in declared(ServeLimits)}
    part = [limits[one] for one in PARTS.get(name, ())]
    settings = part or [one for kind in TABLES[name] for one in declared(kind)]
    only_flags = name not in ("job", "engine", "server", *PARTS)
    lines = ["| flag | default | what it does |" if only_flags else "| keyword | flag | default | what it does |"]
    lines.append("|" + "---|" * lines[0].count("|", 1))
    return "\n".join([*lines, *(_row(one, only_flags=only_flags) for one in settings)]) + "\n"


def _row(one: Declared, *, only_flags: bool) -> str:
    flags = " ".join(f"`{flag}`" for flag in one.flags) or "-"
    words = spelled(one.option.help, "flags" if only_flags else "python")
    cells = [flags, _default(one), words] if only_flags else [f"`{one.name}`", flags, _default(one), words]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(one: Declared) -> str:
    if one.required:
        return "required"
    default = one.default if one.option.shown is None else one.option.shown
    return "-" if default in (None, False, ()) else f"`{default}`"


def _of_engines() -> Iterator[str]:
    """A table of the options of engines: one row for each, with the engines that have it."""
    owners: dict[str, list[type[EngineOptions]]] = {}
    options: dict[str, Declared] = {}
    for kind in declared_engines():
        if known("engines")[f"{kind.task}.{kind.engine}"].package == OWN:
            for one in declared(kind):
                owners.setdefault(one.name, []).append(kind)
                options.setdefault(one.name, one)
    yield "| keyword | flag | tasks and engines | what it does |\n|---|---|---|---|\n"
    for name in sorted(options):
        one = options[name]
        flag = f"`{one.flags[0]}`"
        words = spelled(one.option.help, "python").replace("|", "\\|")
        yield f"| `{name}` | {flag} | {_listed(owners[name])} | {words}{_choices(one)} |\n"


def _choices(one: Declared) -> str:
    found = [value for kind in parts(one.kind) if kind is not NoneType for value in get_args(kind)]
    words: list[Any] = [value for value in found if isinstance(value, str)]
    return f" One of {', '.join(words)}." if words else ""


def _listed(kinds: Iterable[type[EngineOptions]]) -> str:
    by_engine: dict[str, list[str]] = {}
    for kind in kinds:
        by_engine.setdefault(kind.engine, []).append(kind.task)
    return "; ".join(f"{engine} ({', '.join(tasks)})" for engine, tasks in by_engine.items())


if __name__ == "__main__":
    for file in FILES:
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
