"""Short tracebacks for Python programs: the user's line and the error, without Headrace's own frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from headrace.errors import ConfigError, HeadraceError

P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function for users: a HeadraceError that it raises shows only frames of the user's code.

    Other exceptions pass as they are: they come from user code, or show a fault of Headrace.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except HeadraceError as error:
            tidy(error)
            raise

    return wrapper


def naming(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose arguments name files: an OSError about one of them is a ConfigError, unless user code raised it.

    Only calls of the system outside of a job pass here, such as a look at a name that is too long or may not be seen.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.filename is None or _of_user(error.__traceback__) is not None:
                raise
            raise ConfigError(f"cannot use {error.filename!r}: {error.strerror}; name another") from error

    return wrapper


class Tidied:
    """A context manager in which a HeadraceError is made as short as by `public`; for the body of a generator."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HeadraceError):
            tidy(error)


def tidy(error: HeadraceError) -> None:
    """Leave out frames that are not the user's.

    The message of a ConfigError tells its cause, and a HeadraceError is the cause of its own copies: such a cause stays
    only if it comes from the user's code. Any other cause stays whole.
    """
    error.__traceback__ = _of_user(error.__traceback__)
    cause = error.__cause__
    told = isinstance(error, ConfigError) or isinstance(cause, HeadraceError)
    if cause is not None and told and _of_user(cause.__traceback__) is None:
        error.__cause__ = None
    error.__suppress_context__ = True


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that belong to the user's own files."""
    if trace is None:
        return None
    rest = _of_user(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_not_of_user()):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


@functools.cache
def _not_of_user() -> tuple[str, ...]:
    """How the names of files begin that are not the user's: those of Headrace, Python and installed packages."""
    import sysconfig  # here, as batchers are imported quickly

    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return ("<frozen ", str(Path(__file__).parent), *libraries)
