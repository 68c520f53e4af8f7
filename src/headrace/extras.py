"""Imports of optional libraries."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from types import ModuleType

from headrace.errors import MissingExtraError


def require(module: str, extra: str, what: str, instead: str = "") -> ModuleType:
    """Import a module of an optional library.

    Args:
        extra: the extra of Headrace that installs it.
        what: what needs it, for the message.
        instead: the end of the message, such as another way out.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise MissingExtraError(
            f'{what} needs {missing}, which is not installed: pip install "headrace[{extra}]"{instead}'
        ) from error


class _Lazy(ModuleType):
    """Imports the module of its name when something of it is asked for."""

    def __getattr__(self, name: str) -> object:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found


def lazy(module: str) -> ModuleType:
    """A module of an optional library, which is imported when it is used: most commands need none of them.

    For type checkers the module is imported as usual:

        if TYPE_CHECKING:
            import numpy
        else:
            numpy = lazy("numpy")
    """
    return _Lazy(module)


def missing_packages(package: str, extra: str) -> tuple[str, ...]:
    """The packages of an extra that are not installed; those that it needs only on some machines are not looked for.

    Args:
        package: the distribution that has the extra.
        extra: its name; empty for none.
    """
    try:
        wanted = metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return ()
    missing: list[str] = []
    for one in wanted:
        found = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?[^;]*;\s*extra\s*==\s*['\"]([\w-]+)['\"]\s*", one)
        if found is None or found[3] != extra:
            continue
        if found[1] == package:  # an extra of other extras
            missing += [name for other in (found[2] or "").split(",") for name in missing_packages(package, other)]
        elif not _is_installed(found[1]):
            missing.append(found[1])
    return tuple(dict.fromkeys(missing))


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
