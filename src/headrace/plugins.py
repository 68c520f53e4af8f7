"""The registry of plugins: entry points of the installed packages, by group and name.

A package registers a task, engine, format, source, sink, exporter, protocol or cluster in its `pyproject.toml`:

    [project.entry-points."headrace.engines"]
    "embed.mine" = "my_package.engine:Mine"

Names are read from the packages' metadata; a plugin is imported when it is used, so a broken one costs only itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import metadata
from typing import Literal, TypeAlias, TypeVar, cast, get_args

from headrace.argument_types import check_types
from headrace.errors import ConfigError, attempted, nearest, text_of

T = TypeVar("T")

Group: TypeAlias = Literal["tasks", "engines", "formats", "sources", "sinks", "exporters", "protocols", "clusters"]
GROUPS: tuple[Group, ...] = get_args(Group)
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

    @property
    def problem(self) -> str | None:
        """Why it cannot be used, as a whole sentence; None if it can. Imports it."""
        try:
            self.load()
        except ConfigError as error:
            return str(error)
        return None

    def load(self) -> object:
        """Import what it registers.

        Raises:
            ConfigError: it cannot be used; the message names its package, and says why.
        """
        return _imported(self)


@functools.cache
def _registered() -> Mapping[str, Sequence[tuple[str, metadata.EntryPoint]]]:
    """The entry points of all groups of Headrace, each with its package. One look through all packages: 10 ms."""
    found: dict[str, list[tuple[str, metadata.EntryPoint]]] = {}
    packages: set[str] = set()
    for package in metadata.distributions():
        if f"[{OWN}." not in (package.read_text("entry_points.txt") or ""):
            continue  # before its name is asked for, which parses its metadata
        if (name := package.name) in packages:
            continue  # a folder that comes first has another version of it
        packages.add(name)
        for entry in package.entry_points:
            found.setdefault(entry.group, []).append((name, entry))
    return found


def forget() -> None:
    """Look again for packages: for tests, which install some while they run."""
    for cached in (_registered, known, _imported, _quietly):
        cached.cache_clear()


@functools.cache
def known(group: Group) -> Mapping[str, Plugin]:
    """What is registered in a group, by name: Headrace's own first, then the others. Imports nothing.

    Raises:
        ConfigError: Headrace's own are not registered: its sources are there, but they are not installed.
    """
    found: dict[str, Plugin] = {}
    entries = _registered().get(f"headrace.{group}", ())
    if all(package != OWN for package, _ in entries):
        raise ConfigError(
            f"Headrace's own {group} are not registered, as its sources are newer than what is installed, or are not "
            "installed: install it again, as with `pip install -e .` in its folder"
        )
    for package, entry in sorted(entries, key=lambda one: (one[0] != OWN, one[1].name)):
        if (earlier := found.get(entry.name)) is not None:
            if earlier.package not in (package, OWN):  # what takes one of Headrace's own names is left out
                found[entry.name] = Plugin(
                    group, entry.name, earlier.package, earlier.reference, earlier.entry, package
                )
            continue
        found[entry.name] = Plugin(group, entry.name, package, entry.value, entry)
    return found


def addresses(group: Group) -> tuple[str, ...]:
    """How the addresses begin that plugins of a group are for, such as `sqlite://`. Imports nothing."""
    return tuple(f"{name}://" for name in known(group) if name.isalpha())


def left_out(group: Group) -> Sequence[Plugin]:
    """Plugins of other packages that have the name of one of Headrace's own, which is used instead."""
    return [
        Plugin(group, entry.name, package, entry.value, entry, OWN)
        for package, entry in _registered().get(f"headrace.{group}", ())
        if package != OWN and known(group)[entry.name].package == OWN
    ]


def load(group: Group, name: str, kind: type[T]) -> T:
    """Import the plugin with this name, and return what it registers, which must be of this kind, or a class of it.

    Raises:
        ConfigError: there is none (the message lists what is known), two packages register the name, its import fails,
            or it is something else; the message names its package.
    """
    plugins = known(group)
    plugin = plugins.get(name)
    if plugin is None:
        raise ConfigError(
            f"unknown {group.removesuffix('s')} {name!r}; known: {', '.join(plugins)}{nearest(name, tuple(plugins))}"
        )
    return _of_kind(plugin, kind)


def working(group: Group, kind: type[T], tell: Callable[[str], object] | None = None) -> dict[str, T]:
    """What the plugins of a group register, by name, without those that cannot be used.

    Args:
        group: whose plugins.
        kind: what they must be.
        tell: called with the reason for each that is left out, if nobody will name it and read the reason then.
    """
    if tell is None:
        quietly = cast("Callable[[Group, type[T]], dict[str, T]]", _quietly)
        return dict(quietly(group, kind))
    return _working(group, kind, tell)


@functools.cache
def _quietly(group: Group, kind: type[object]) -> dict[str, object]:
    return _working(group, kind, None)


def _working(group: Group, kind: type[T], tell: Callable[[str], object] | None) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, plugin in known(group).items():
        try:
            found[name] = _of_kind(plugin, kind)
        except ConfigError as error:
            if plugin.package == OWN:
                raise  # a bug of Headrace's
            if tell is not None:
                tell(str(error))
    return found


def _of_kind(plugin: Plugin, kind: type[T]) -> T:
    found = plugin.load()
    if not isinstance(found, kind):
        raise ConfigError(
            f"{plugin} is a {type(found).__name__}; it must be a {kind.__name__}: mend or uninstall the package"
        )
    if plugin.package != OWN:
        _check_fields(plugin, found)
    return found


def _check_fields(plugin: Plugin, found: object) -> None:
    if is_dataclass(found) and not isinstance(found, type):
        try:
            check_types(found)
        except ConfigError as error:
            raise ConfigError(f"{plugin}: {error.args[0].replace('``', '')}: mend or uninstall the package") from error


@functools.cache
def _imported(plugin: Plugin) -> object:
    if plugin.doubled is not None:
        raise ConfigError(
            f"two packages register the {plugin.group.removesuffix('s')} {plugin.name!r}: {plugin.package} and "
            f"{plugin.doubled}; " + (f"{OWN}'s own is used" if plugin.doubled == OWN else "uninstall one of them")
        )
    if (wanted := _newer(plugin.package)) is not None:
        raise ConfigError(
            f"{plugin} needs {wanted}; installed is {metadata.version(OWN)}: upgrade Headrace, or uninstall the package"
        )
    found: object = attempted(plugin.entry.load)
    if isinstance(found, KeyboardInterrupt):
        raise found
    if isinstance(found, BaseException):
        words = " ".join(text_of(found).split())
        raise ConfigError(
            f"{plugin} cannot be imported: {type(found).__name__}: {words}; mend or uninstall the package"
        ) from found
    return found


def _newer(package: str) -> str | None:
    """The requirement of a package for a newer Headrace than this one; None if there is none."""
    if package in (OWN, "?"):
        return None
    for one in metadata.requires(package) or ():
        least = re.match(rf"{OWN}(?:\[.*?\])?\s*\(?[^;]*?>=\s*([\d.]+)", one)
        if least is not None and _numbers(least[1]) > _numbers(metadata.version(OWN)):
            return one
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)][:3]
