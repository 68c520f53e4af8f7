"""Where files are: a path of this machine, or an address such as `s3://bucket/key`."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import ConfigError, MissingExtraError
from headrace.retry import PermanentIOError, RetryPolicy, is_transient_io

T = TypeVar("T")

_SCHEME_REFRESHES = {"s3", "hf"}
"""Whose clients answer from memory unless told not to."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")
KNOWN_SCHEMES = ("s3", "gs", "hf", "http", "https")
RETRIES = RetryPolicy(max_attempts=8, backoff_s=0.1, max_backoff_s=10.0)
"""Of a call to an object store."""
_NOT_FOUND = 404

_CLIENTS = {"gs": "gcsfs"}
"""Clients that no extra brings."""

# Listings are never cached: they are the ledger. Calls are tried again by the store's own client where it can.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": RETRIES.max_attempts}},
    },
    "gs": {"use_listings_cache": False},
    "hf": {"use_listings_cache": False},
}


def locate(name: str | Path) -> Path:
    """The place that a name stands for; an address gives an object with the methods of a path.

    Credentials and endpoints come from the store's own settings (such as `AWS_PROFILE` and `AWS_ENDPOINT_URL`).

    Raises:
        ConfigError: a scheme that is not known.
        MissingExtraError: what the store needs is not installed.
    """
    found = _SCHEME.match(str(name)) if isinstance(name, str) else None
    if found is None:
        return Path(name)
    scheme = found[1]
    if scheme == "file":
        return Path(str(name).removeprefix("file://"))
    if scheme not in KNOWN_SCHEMES:
        raise ConfigError(f"cannot reach {name}: unknown scheme {scheme!r}; known: {', '.join(KNOWN_SCHEMES)}")
    try:
        from upath import UPath

        options = _OPTIONS.get(scheme, {})
        place: Any = UPath(str(name), **options)
        place._fs_cached = _client(scheme)(**options)  # and so all places made of this one
    except ImportError as error:
        package = _CLIENTS.get(scheme, '"headrace[io]"')
        raise MissingExtraError(
            f"{scheme}:// needs a client that is not installed ({error}): pip install {package}"
        ) from error
    return place  # type: ignore[no-any-return]  # has a path's methods, though it is none


def _client(scheme: str) -> Any:
    """fsspec's own class for a scheme, even where another library has put its own in that place, as flyte does.

    Raises:
        ImportError: it is not installed.
    """
    from fsspec.registry import known_implementations

    module, _, name = known_implementations[scheme]["class"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def can_write(place: Path) -> bool:
    """Whether what is there may be written at all: http has no way to."""
    return not is_remote(place) or not {"http", "https"} & {store(place)[0].protocol, *store(place)[0].protocol}


def is_remote(place: Path) -> bool:
    """Whether it is an address rather than a path of this machine."""
    return not isinstance(place, Path)


def store(place: Path) -> tuple[Any, str]:
    """The fsspec file system of an address, and the address within it."""
    remote: Any = place
    return remote.fs, remote.path


def facts(place: Path) -> dict[str, Any]:
    """What a store says about an object, asked anew: its type, size, and most often a tag of its content.

    Raises:
        FileNotFoundError: there is none.
    """
    fs, address = store(place)
    options = {"refresh": True} if _SCHEME_REFRESHES & {fs.protocol, *fs.protocol} else {}
    found: dict[str, Any] = with_retries(lambda: fs.info(address, **options))()
    return found


def exists(place: Path) -> bool:
    """Whether something is there."""
    if not is_remote(place):
        return place.exists()
    fs, address = store(place)
    return bool(with_retries(fs.exists)(address))


def with_retries(call: Callable[..., T]) -> Callable[..., T]:
    """Try a call to a store again while it fails, with random and growing waits between.

    What the caller got wrong (no such key, no permission, a condition not met) is not tried again. Whatever the store's
    client raises, an OSError comes out.
    """
    import tenacity

    retried: Callable[..., T] = tenacity.retry(**RETRIES.for_tenacity(is_transient_io))(as_os_errors(call))
    return retried


def as_os_errors(call: Callable[..., T]) -> Callable[..., T]:
    """A call to a store that raises OSError where its client has errors of its own kind."""

    @functools.wraps(call)
    def translated(*args: Any, **options: Any) -> T:
        passing, lasting = _client_errors()
        try:
            return call(*args, **options)
        except FileNotFoundError as error:
            cause = error.__cause__  # of http addresses that were not reached too
            if isinstance(cause, (*passing, TimeoutError)) and getattr(cause, "status", 0) != _NOT_FOUND:
                raise OSError(f"{type(cause).__name__}: {cause}") from error
            raise
        except passing as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        except lasting as error:
            raise PermanentIOError(str(error)) from error

    return translated


@functools.cache
def _client_errors() -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """What the clients of stores raise beside OSError: what may pass, and what their own retries have given up."""
    passing: list[type[Exception]] = []
    lasting: list[type[Exception]] = []
    try:
        from aiohttp import ClientError

        passing.append(ClientError)
    except ImportError:
        pass
    try:
        from huggingface_hub.errors import HfHubHTTPError

        passing += HfHubHTTPError.__bases__[:1]  # the HTTPError of the client it uses, which differs by version
    except ImportError:
        pass
    try:
        from botocore.exceptions import BotoCoreError

        lasting.append(BotoCoreError)
    except ImportError:
        pass
    return tuple(passing), tuple(lasting)


def drop_uploads(*places: Path) -> None:
    """End the multipart uploads to an object, or into a folder, that killed processes have left: S3 bills for them.

    Called by the only writer there. Other stores forget theirs by themselves, and so does S3 where its rules say so.
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
        except OSError:  # a store that has no such call, or does not let this user make it
            return


def file_names(folder: Path) -> list[str]:
    """What is in a folder; nothing if there is none."""
    try:
        if not is_remote(folder):
            return [path.name for path in folder.iterdir()]
        fs, address = store(folder)
        found = with_retries(lambda: fs.ls(address, detail=False, refresh=True))()
    except FileNotFoundError:
        return []
    return [name.rstrip("/").rpartition("/")[2] for name in found]


def file_sizes(folder: Path) -> dict[str, int]:
    """What is in a folder, with its size in bytes; nothing if there is none."""
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
    """Remove a folder of files, if it is there."""
    for name in file_names(folder):
        remove(folder / name)
    if not is_remote(folder) and folder.exists():
        folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    if not is_remote(path):
        path.unlink(missing_ok=True)
        return
    fs, address = store(path)
    try:
        with_retries(lambda: fs.rm_file(address))()
    except FileNotFoundError:
        pass
