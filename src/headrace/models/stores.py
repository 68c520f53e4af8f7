"""Models in object stores, such as s3://bucket/model, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, EngineError, HeadraceError, MissingExtraError, first_line
from headrace.fsspec_clients import fsspec_client
from headrace.models.base import Listing

if TYPE_CHECKING:
    import fsspec

SCHEMES = ("s3://", "gs://")
_TAGS = ("ETag", "etag", "md5Hash", "generation")
"""Metadata of an object that change with its content, in the stores that have them."""
_NOTE = "listing.json"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in an object store. See `RemoteModel` for the methods.

    Its commit is a digest of the names, sizes and tags of its files.
    """

    typed: str
    """Its address, as the user wrote it."""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.typed.rstrip("/").rpartition("/")[2]

    def look_up(self, commit: str | None = None) -> Listing:
        """List the store, or read what an earlier listing of this commit has noted."""
        if commit is not None and (noted := self._noted(commit)) is not None:
            return noted
        found = self._listed()
        if commit is not None and found.commit != commit:
            raise ConfigError(
                f"model {self.typed!r} has changed, and version {commit} is not in the cache; restore it, or start "
                "again with the present version (``overwrite=True``)"
            )
        note = self._folder(found.commit) / _NOTE
        with self._as_own_errors():
            note.parent.mkdir(parents=True, exist_ok=True)
            with _whole(note) as half:
                half.write_text(json.dumps(found.files))
        return found

    def download(self, commit: str, files: Sequence[str], *, progress: bool = False) -> Path:  # noqa: ARG002 - no bar
        """Download what is missing; each file is complete or not there."""
        folder = self._folder(commit)
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            with self._as_own_errors():
                store, place = self._store()
                for name in missing:
                    _fetch(store, f"{place}/{name}", folder / name)
            if self._listed().commit != commit:  # changed during the download: no telling what was read
                for name in missing:
                    (folder / name).unlink()
                raise EngineError(f"model {self.typed!r} changed during its download; run the same command again")
        return folder

    def newest(self) -> str | None:
        """List the store; any failure means None."""
        try:
            return self._listed().commit
        except HeadraceError:
            return None

    def _folder(self, commit: str) -> Path:
        """Where the files of this commit are kept, as the XDG Base Directory Specification says."""
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        address = hashlib.blake2b(self.typed.rstrip("/").encode(), digest_size=8).hexdigest()
        return (base if base.is_absolute() else Path.home() / ".cache") / "headrace" / "models" / address / commit

    def _noted(self, commit: str) -> Listing | None:
        try:
            return Listing(commit, tuple(json.loads((self._folder(commit) / _NOTE).read_bytes())))
        except (OSError, ValueError):
            return None

    def _listed(self) -> Listing:
        with self._as_own_errors():
            store, place = self._store()
            found: dict[str, dict[str, object]] = store.find(place, detail=True)
        total = hashlib.blake2b(digest_size=20)
        names = []
        for path, facts in sorted(found.items()):
            names.append(path.removeprefix(place).lstrip("/"))
            if ".." in names[-1].split("/"):
                raise ConfigError(f"model {self.typed!r} holds {names[-1]!r}, which would lie outside of its folder")
            tags = [str(facts.get(name)) for name in _TAGS]
            total.update(json.dumps([names[-1], facts.get("size"), tags]).encode())
        if not names:
            raise ConfigError(f"model {self.typed!r}: there are no files at this address")
        return Listing(total.hexdigest(), tuple(names))

    def _store(self) -> tuple[fsspec.AbstractFileSystem, str]:
        client = fsspec_client(self.typed.partition("://")[0])
        return client(use_listings_cache=False), client._strip_protocol(self.typed.rstrip("/"))

    @contextmanager
    def _as_own_errors(self) -> Iterator[None]:
        try:
            yield
        except HeadraceError:
            raise
        except ImportError as error:
            raise MissingExtraError(
                f'model {self.typed!r} needs a client that is not installed ({error}): pip install "headrace[io]"'
            ) from error
        except FileNotFoundError as error:
            raise ConfigError(
                f"model {self.typed!r}: there is no such folder in the store ({first_line(error)})"
            ) from error
        except PermissionError as error:
            raise ConfigError(f"model {self.typed!r}: the store denies access ({first_line(error)})") from error
        except Exception as error:  # the clients of stores raise their own errors
            raise EngineError(f"model {self.typed!r} cannot be read from the store: {first_line(error)}") from error


def _fetch(store: fsspec.AbstractFileSystem, place: str, path: Path) -> None:
    """Download one file, which is complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole(path) as half:
        store.get_file(place, str(half))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` when it is complete."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
