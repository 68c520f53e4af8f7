"""The interface of models that must be downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model at one version."""

    commit: str
    """The version: a commit hash of the hub, or a digest of the listing of a store."""
    files: tuple[str, ...]
    """Paths relative to the model."""


class RemoteModel(Protocol):
    """A model that must be downloaded. All methods block.

    Raises:
        ConfigError: there is no such model or revision, or it may not be read.
        EngineError: it cannot be downloaded now.
        MissingExtraError: the library that downloads it is not installed.
    """

    @property
    def name(self) -> str:
        """Its name in requests to a server: without scheme and revision."""
        ...

    def look_up(self, commit: str | None = None) -> Listing:
        """The files of this commit, or of the newest one of the revision."""
        ...

    def download(self, commit: str, files: Sequence[str], *, progress: bool = False) -> Path:
        """A local folder with these files. What is in the cache is not downloaded again.

        Args:
            commit: the version, from `look_up`.
        """
        ...

    def newest(self) -> str | None:
        """The newest commit of the revision; None if it is unknown now, or never changes."""
        ...
