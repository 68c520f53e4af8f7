"""The registry of plugins: entry points of the installed packages, by group and name.

A package registers a task, engine, source, sink, exporter or protocol in its `pyproject.toml`:

    [project.entry-points."headrace.engines"]
    "embed.mine" = "my_package.engine:ENGINE"

Names are read from the packages' metadata; a plugin is imported when it is used, so a broken one costs only itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, TypeAlias

from headrace.errors import ConfigError, StoppedEarly, nearest, text_of

Group: TypeAlias = Literal["tasks", "engines", "formats", "sources", "sinks", "exporters", "protocols", "clusters"]
OWN = "headrace"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point. Not imported yet."""

    group: Group
    name: str
    package: str
    """The distribution that registers it."""
    reference: str
    """`module:attribute`"""
    entry: metadata.EntryPoint
    doubled: str | None = None
    """Another package that registers the same name; None if there is none."""

    def __str__(self) -> str:
        return f"{self.group.removesuffix('s')} {self.name!r} of package {self.package}"


@functools.cache
def known(group: Group) -> Mapping[str, Plugin]:
    """What is registered in a group, by name: Headrace's own first, in its order. Imports nothing."""
    found: dict[str, Plugin] = {}
    entries = metadata.entry_points(group=f"headrace.{group}")
    for entry in sorted(entries, key=lambda entry: entry.dist is None or entry.dist.name != OWN):
        package = entry.dist.name if entry.dist is not None else "?"
        if (earlier := found.get(entry.name)) is not None:
            if earlier.package != package:
                found[entry.name] = Plugin(
                    group, entry.name, earlier.package, earlier.reference, earlier.entry, package
                )
            continue
        found[entry.name] = Plugin(group, entry.name, package, entry.value, entry)
    return found


def find(group: Group, name: str) -> Plugin:
    """The plugin with this name.

    Raises:
        ConfigError: there is none (the message lists what is known), or two packages register the name.
    """
    plugins = known(group)
    plugin = plugins.get(name)
    if plugin is None:
        raise ConfigError(
            f"unknown {group.removesuffix('s')} {name!r}; known: {', '.join(plugins)}{nearest(name, tuple(plugins))}"
        )
    if plugin.doubled is not None:
        raise ConfigError(
            f"two packages register the {group.removesuffix('s')} {name!r}: {plugin.package} and {plugin.doubled}; "
            "uninstall one of them"
        )
    return plugin


def load(group: Group, name: str) -> Any:
    """Import the plugin with this name, and return what it registers.

    Raises:
        ConfigError: there is none, or its import fails; the message names its package.
    """
    return _loaded(find(group, name))


@functools.cache
def _loaded(plugin: Plugin) -> Any:
    try:
        return plugin.entry.load()
    except (StoppedEarly, KeyboardInterrupt):
        raise
    except BaseException as error:  # a border: the code of another package may raise anything
        words = " ".join(text_of(error).split())
        raise ConfigError(
            f"{plugin} cannot be imported: {type(error).__name__}: {words}"
            f"{_needs(plugin.package)}; mend or uninstall it"
        ) from error


def _needs(package: str) -> str:
    """Which Headrace a foreign package asks for, as the end of a sentence; empty if it does not say."""
    wanted = [one for one in metadata.requires(package) or () if one.lower().startswith(OWN)] if package != OWN else []
    return f" (it requires {wanted[0]}; installed is {metadata.version(OWN)})" if wanted else ""
