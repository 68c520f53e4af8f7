"""`headrace list`: the tasks, engines, formats and other plugins that are installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import typer

from headrace.cli.flags import with_settings
from headrace.cli.outcome import aligned
from headrace.cluster.base import Cluster
from headrace.engines.choosing.registry import declaration
from headrace.engines.declaring import Task
from headrace.engines.tasks import task_named
from headrace.errors import ConfigError
from headrace.extras import missing_packages
from headrace.io.base import SourcePlugin
from headrace.io.formats.known import Format
from headrace.io.sinks.targets import SinkPlugin
from headrace.options import option
from headrace.plugins import GROUPS, Group, Plugin, known, left_out, load

EXAMPLES = """Examples:

headrace list

headrace list engines --json
"""

Which = Annotated[Group | None, typer.Argument(help="What to list. Default: everything.")]


@dataclass(frozen=True, slots=True)
class ListFlags:
    """How it is listed."""

    panel: ClassVar[str] = "Options"

    as_json: bool = option(False, "Print a JSON array with one object for each.", flags=("--json",))


def _protocol(name: str) -> object:
    known("protocols")[name].load()  # without the server's libraries, this says what is missing
    from headrace.serving.protocols import ServerProtocol

    return load("protocols", name, ServerProtocol)


_OF_GROUP: Mapping[Group, Callable[[str], object]] = {
    "tasks": task_named,
    "engines": declaration,
    "formats": lambda name: load("formats", name, Format),
    "sources": lambda name: load("sources", name, SourcePlugin),
    "sinks": lambda name: load("sinks", name, SinkPlugin),
    "exporters": lambda name: load("exporters", name, type),
    "clusters": lambda name: load("clusters", name, Cluster),
    "protocols": _protocol,
}
"""What is checked of each group."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One plugin, as it is shown."""

    group: Group
    name: str
    package: str
    reference: str
    extra: str
    """The extra of its package that it needs; empty if it needs none."""
    missing: Sequence[str]
    """Packages of the extra that are not installed."""
    problem: str | None
    """Why it cannot be used at all; None if it can."""
    about: str

    @property
    def state(self) -> str:
        """One word, or the way out."""
        if self.problem is not None:
            return "broken"
        return f'pip install "{self.package}[{self.extra}]"' if self.missing else "installed"


@with_settings
def list_plugins(flags: ListFlags, which: Which = None) -> int:
    """List the tasks, engines, formats, sources, sinks, exporters, protocols and clusters that are registered.

    Each is shown with the package that registers it, and whether what it needs is installed. A plugin that cannot be
    used is shown with its reason, and the exit status is 0 all the same: it costs only itself.
    """
    groups = GROUPS if which is None else (which,)
    found = [_listed(plugin) for group in groups for plugin in (*known(group).values(), *left_out(group))]
    if flags.as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    for group in groups:
        rows = [(one.name, one.package, one.state, one.about) for one in found if one.group == group]
        if rows:
            print(f"{group}:", *aligned(rows, 4), sep="\n  ")
    for one in found:
        if one.problem is not None:
            print(f"broken: {one.problem}")
    return 0


def _listed(plugin: Plugin) -> Listed:
    facts = plugin.group, plugin.name, plugin.package, plugin.reference
    try:
        found = plugin.load() if plugin.doubled else _OF_GROUP[plugin.group](plugin.name)
    except ConfigError as error:
        return Listed(*facts, "", (), str(error), "")
    extra = str(getattr(found, "extra", ""))
    return Listed(*facts, extra, missing_packages(plugin.package, extra), None, _about(found))


def _about(found: object) -> str:
    """A few words: a task's columns, or the first line of what a plugin's own docstring says."""
    if isinstance(found, Task):
        return f"{found.input} -> {found.output}"
    own = found.__doc__ if isinstance(found, type) or callable(found) else None
    return (own or "").strip().partition("\n")[0]
