"""File locations: local paths, and remote URLs such as `s3://bucket/key`."""

from __future__ import annotations

import functools
import glob
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import ConfigError, MissingExtraError, nearest
from headrace.fsspec_clients import fsspec_client
from headrace.plugins import Group, known
from headrace.retry import PermanentIOError, RetryPolicy, is_transient_io

if TYPE_CHECKING:
    import fsspec

T = TypeVar("T")

_SCHEME_REFRESHES = {"s3", "hf"}
"""Schemes whose clients cache listings unless refreshed."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")
_GROUPS: tuple[Group, ...] = ("sources", "sinks")
KNOWN_SCHEMES = ("s3", "gs", "hf", "http", "https")
RETRIES = RetryPolicy(max_attempts=8, backoff_s=0.1, max_backoff_s=10.0)
"""Retries of calls to an object store."""
_REPOSITORY = re.compile(
    r"hf://(?:(?:datasets|models|spaces|buckets|kernels)/)?(?!datasets/|models/|spaces/)[^/]+/[^/]+.*"
)
_NOT_FOUND = 404
_GLOB = frozenset("*?[")

_CLIENTS = {"gs": "gcsfs"}
"""Clients that no extra installs."""

# Listings are never cached, because they record what is committed. The store's client retries calls if it can.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": RETRIES.max_attempts}},
    },
    "gs": {"use_listings_cache": False},
    "hf": {"use_listings_cache": False},
}


def locate(name: str | Path) -> Path:
    """The location for a name; a URL gives an object with a path's methods.

    Credentials and endpoints come from the store's own settings (such as `AWS_PROFILE` and `AWS_ENDPOINT_URL`).

    Raises:
        ConfigError: the scheme is unknown, or the address names no place in it.
        MissingExtraError: the store's client is not installed.
    """
    found = _SCHEME.match(str(name)) if isinstance(name, str) else None
    if found is None:
        return Path(name)
    scheme = found[1]
    if scheme == "file":
        return Path(str(name).removeprefix("file://"))
    if scheme not in KNOWN_SCHEMES:
        others = {key for group in _GROUPS for key in known(group) if key.isidentifier() and key[0] != "_"}
        names = (*KNOWN_SCHEMES, *sorted(others - {*KNOWN_SCHEMES}))
        way_out = f"known: {', '.join(names)}{nearest(scheme, names)}"
        raise ConfigError(f"cannot reach {name}: unknown scheme {scheme!r}; {way_out}")
    if scheme == "hf" and _REPOSITORY.fullmatch(str(name)) is None:
        raise ConfigError(f"{name} names no repository; write hf://datasets/org/name, with the path of a file in it")
    if not str(name)[found.end() :].strip("/"):
        raise ConfigError(f"{name} names no bucket or host; write the whole address, such as s3://bucket/folder/")
    try:
        from upath import UPath

        options = _OPTIONS.get(scheme, {})
        place: Any = UPath(str(name), **options)
        place._fs_cached = fsspec_client(scheme)(**options)  # also used by locations derived from this one
    except ImportError as error:
        package = _CLIENTS.get(scheme, '"headrace[io]"')
        raise MissingExtraError(
            f"{scheme}:// needs a client that is not installed ({error}): pip install {package}"
        ) from error
    return place  # type: ignore[no-any-return]  # has a path's methods, but is not a Path


def anchored(name: str | Path) -> str | Path:
    """A path with the folder that it is in, so that it stays the same if user code changes the current folder.

    Absolute paths and addresses stay as they are, and so does "-". A `~/` is the user's folder.

    Raises:
        ConfigError: it has a null character, or the current folder has been deleted.
    """
    text = str(name)
    if "\0" in text:
        raise ConfigError(f"cannot use {text!r}: no file has a name with a null character; leave it out")
    if text in ("", "-") or "://" in text or text.startswith("/"):
        return name
    if text.startswith("~/"):  # which no shell has replaced, as in Python and YAML
        return type(name)(os.path.expanduser(text))  # noqa: PTH111 - a trailing slash says that the name is a folder
    try:
        here = os.getcwd()  # noqa: PTH109 - a trailing slash says that the name is a folder
    except FileNotFoundError:
        raise ConfigError(
            f"cannot find {text}: the current folder has been deleted; name it with its whole path, or go to another"
        ) from None
    if _GLOB & set(text) and not os.path.lexists(text):
        here = glob.escape(here)
    return here / name if isinstance(name, Path) else os.path.join(here, name)  # noqa: PTH118 - as above


def as_named(text: object) -> str:
    """Text for people: the paths in it without the current folder in front, unless that is the root of all."""
    try:
        here = os.getcwd().rstrip("/")  # noqa: PTH109 - as above
    except FileNotFoundError:
        here = ""
    return re.sub(rf"(?<![\w/.~-]){re.escape(here)}/", "", str(text)) if here else str(text)


def can_write(place: Path) -> bool:
    """Whether the location can be written; http cannot, nor files of the hub, where each part would be a commit."""
    return not is_remote(place) or not {"http", "https", "hf"} & {store(place)[0].protocol, *store(place)[0].protocol}


def no_folder(place: Path) -> str:
    """Why nothing can be written into `place`, which is not a folder, and the way out."""
    return f"{place} is not a folder" if place.exists() else f"there is no folder {place}; create it"


def is_remote(place: Path) -> bool:
    """Whether it is remote rather than a local path."""
    return not isinstance(place, Path)


def store(place: Path) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a remote location, and the path within it."""
    remote: Any = place
    return remote.fs, remote.path


def facts(place: Path) -> dict[str, Any]:
    """A store's current metadata of an object: type, size, and usually a content tag.

    Raises:
        FileNotFoundError: the object does not exist.
    """
    fs, address = store(place)
    options = {"refresh": True} if _SCHEME_REFRESHES & {fs.protocol, *fs.protocol} else {}
    found: dict[str, object] = with_retries(lambda: fs.info(address, **options))()
    return found


def exists(place: Path) -> bool:
    if not is_remote(place):
        return place.exists()
    fs, address = store(place)
    return bool(with_retries(fs.exists)(address))


def with_retries(call: Callable[..., T]) -> Callable[..., T]:
    """Retry a call to a store while it fails, with random, growing waits.

    Permanent errors (no such key, no permission, a failed condition) are not retried. All errors of the store's client
    become OSError.
    """
    import tenacity

    retried: Callable[..., T] = tenacity.retry(**RETRIES.for_tenacity(is_transient_io))(as_os_errors(call))
    return retried


def as_os_errors(call: Callable[..., T]) -> Callable[..., T]:
    """Wrap a call to a store so that its client's errors become OSError."""

    @functools.wraps(call)
    def translated(*args: object, **options: object) -> T:
        try:
            return call(*args, **options)
        except FileNotFoundError as error:
            cause = error.__cause__  # also raised for http URLs that cannot be reached
            if isinstance(cause, (*_transient_errors(), TimeoutError)) and getattr(cause, "status", 0) != _NOT_FOUND:
                raise OSError(f"{type(cause).__name__}: {cause}") from error
            raise
        except _transient_errors() as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        except _permanent_errors() as error:
            raise PermanentIOError(str(error)) from error

    return translated


def _transient_errors() -> tuple[type[Exception], ...]:
    """Exceptions of store clients, other than OSError, that may pass."""
    http = _imported("huggingface_hub.errors", "HfHubHTTPError")
    # The hub's error derives from the HTTPError of the client it uses, which differs by version.
    return _imported("aiohttp", "ClientError") + tuple(error.__bases__[0] for error in http)


def _permanent_errors() -> tuple[type[Exception], ...]:
    """Exceptions of store clients, other than OSError, that another try does not change."""
    return _imported("botocore.exceptions", "BotoCoreError") + _imported("huggingface_hub.errors", "HfUriError")


def _imported(module: str, name: str) -> tuple[type[Exception], ...]:
    """An exception of a client, if the client has been imported: otherwise it cannot have been raised.

    Importing the clients here would delay each command by a second.
    """
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def abort_uploads(*places: Path) -> None:
    """Abort multipart uploads left by killed processes to an object or a folder, because S3 bills for them.

    Called by the only writer. Other stores drop incomplete uploads by themselves, as S3 does with a lifecycle rule.
    """
    for place in places:
        fs, address = store(place)
        if "s3" not in fs.protocol:
            return
        bucket, key, _ = fs.split_path(address)
        try:
            found = as_os_errors(fs.call_s3)("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", ())
            for upload in found:
                if upload["Key"] == key or upload["Key"].startswith(f"{key}/"):
                    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except OSError:  # the store lacks this call, or denies it
            return


def file_names(folder: Path) -> list[str]:
    """The names in a folder; empty if it does not exist."""
    try:
        if not is_remote(folder):
            return [path.name for path in folder.iterdir()]
        fs, address = store(folder)
        found = with_retries(lambda: fs.ls(address, detail=False, refresh=True))()
    except FileNotFoundError:
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in found]


def file_sizes(folder: Path) -> dict[str, int]:
    """The names in a folder with their sizes in bytes; empty if it does not exist."""
    try:
        if not is_remote(folder):
            with os.scandir(folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        fs, address = store(folder)
        found = with_retries(lambda: fs.ls(address, detail=True, refresh=True))()
    except FileNotFoundError:
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] or 0 for entry in found}


def remove_folder(folder: Path) -> None:
    """Remove a folder of files, if it exists."""
    for name in file_names(folder):
        remove(folder / name)
    if not is_remote(folder) and folder.exists():
        folder.rmdir()


def remove(path: Path) -> None:
    if not is_remote(path):
        path.unlink(missing_ok=True)
        return
    fs, address = store(path)
    try:
        with_retries(lambda: fs.rm_file(address))()
    except FileNotFoundError:
        pass
