"""Models on the Hugging Face Hub, by huggingface_hub: its cache, tokens, endpoint, offline mode and progress bars."""

from __future__ import annotations

import errno
import glob
import importlib
import logging
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, EngineError, HeadraceError, first_line
from headrace.extras import require
from headrace.models.base import Listing
from headrace.wording import shown

if TYPE_CHECKING:
    import types

logger = logging.getLogger("headrace")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = ("config.json", "modules.json")
LISTING_S = 60.0
"""The library tries again after errors for up to 23 seconds."""
_NEWEST_S = 5.0
"""Maximum seconds to ask whether a revision has moved; the answer is only a notice."""
_NO_PERMISSION = (401, 403)
_TOO_MANY = 429
_AGAIN = "complete files are kept: run the same command again to continue"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub. See `RemoteModel` for the methods."""

    typed: str
    """As the user wrote it."""
    name: str
    """`org/name`."""
    revision: str | None
    """A branch, tag or commit; None for the default branch."""

    def look_up(self, commit: str | None = None) -> Listing:
        """Ask the hub, or the cache if the commit is known there or the hub cannot be asked."""
        hub = _library()
        if commit is None and _COMMIT.fullmatch(self.revision or ""):
            commit = self.revision
        if commit is not None and (files := self._known_files(commit)):
            return Listing(commit, files)
        try:
            info = hub.HfApi().model_info(
                self.name, revision=commit or self.revision, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT
            )
        except hub.errors.RevisionNotFoundError as error:
            raise self._translated(error) from error
        except (hub.errors.HTTPError, OSError, ValueError) as error:
            found = self._cached(commit)
            if found is None:
                raise self._translated(error) from error
            if not hub.constants.HF_HUB_OFFLINE:
                why = f"{hub.constants.ENDPOINT} gave no answer about {self.typed} ({first_line(error)})"
                logger.warning("headrace: %s: using commit %s from the cache", why, found.commit)
            return found
        if _COMMIT.fullmatch(info.sha or "") is None:
            raise EngineError(f"model {self.typed!r}: {hub.constants.ENDPOINT} names {shown(info.sha)} as its commit")
        if commit is None:
            self._remember(info.sha)
        return Listing(info.sha, tuple(entry.rfilename for entry in info.siblings or ()))

    def download(self, commit: str, files: Sequence[str], *, progress: bool = False) -> Path:
        """Download what is missing; complete files stay if the download is cut."""
        hub = _library()
        cached = [hub.try_to_load_from_cache(self.name, name, revision=commit) for name in files]
        if not (cached and all(isinstance(path, str) for path in cached)):
            self._list_files(commit, next((name for name in files if name in _SMALL), files[0]))
            shown = progress and sys.stderr.isatty()
            try:
                hub.snapshot_download(
                    self.name,
                    revision=commit,
                    allow_patterns=[glob.escape(name) for name in files],
                    tqdm_class=None if shown else _no_bar(),
                )
            except (hub.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
                raise self._broken_off(error) from error
        folder = self._cache() / "snapshots" / commit
        if lost := next((name for name in files if not (folder / name).is_file()), None):
            raise EngineError(f"model {self.typed!r}: {lost} is missing after the download; run the same command again")
        return folder

    def newest(self) -> str | None:
        """Ask the hub; any failure means None."""
        hub = _library()
        if _COMMIT.fullmatch(self.revision or ""):
            return None
        try:
            sha: str | None = hub.HfApi().model_info(self.name, revision=self.revision, timeout=_NEWEST_S).sha
        except (hub.errors.HTTPError, OSError, ValueError):
            return None
        return sha

    @property
    def _no_folder(self) -> str:
        """The part of a message that a path may have been meant."""
        return "" if self.typed.startswith("hf://") else "there is no folder of that name, and "

    def _cache(self) -> Path:
        return Path(_library().constants.HF_HUB_CACHE).expanduser() / f"models--{self.name.replace('/', '--')}"

    def _known_files(self, commit: str) -> tuple[str, ...]:
        """All files of a commit, as an earlier download has noted them; empty if unknown."""
        hub = _library()
        try:
            return tuple(file.path for file in hub.get_cached_repo_tree(self.name, revision=commit))
        except (hub.errors.CachedRepoTreeNotFoundError, OSError):
            return ()

    def _list_files(self, commit: str, small: str) -> None:
        """Note all files of a commit in the cache, with a small one. For this alone, the library sets no time limit."""
        if self._known_files(commit):
            return
        thread = threading.Thread(target=self._listed, args=(commit, small), name="headrace-hub", daemon=True)
        thread.start()
        thread.join(LISTING_S)
        if thread.is_alive():
            endpoint = _library().constants.ENDPOINT
            raise EngineError(f"model {self.typed!r}: {endpoint} did not list its files in {LISTING_S:g} s; try again")

    def _listed(self, commit: str, small: str) -> None:
        hub = _library()
        with suppress(hub.errors.HTTPError, OSError, ValueError):  # the download will meet it again
            hub.snapshot_download(self.name, revision=commit, allow_patterns=[glob.escape(small)], tqdm_class=_no_bar())

    def _cached(self, commit: str | None) -> Listing | None:
        """What the cache holds of this commit, or of the one that the revision was when it was last asked for."""
        hub = _library()
        try:
            folder = hub.snapshot_download(
                self.name, revision=commit or self.revision, local_files_only=True, allow_patterns=[]
            )
        except (OSError, ValueError):
            return None
        commit = Path(folder).name
        there = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
        return Listing(commit, self._known_files(commit) or tuple(sorted(there)))

    def _remember(self, commit: str) -> None:
        """Note in the hub's cache which commit the revision is, for later use without a network."""
        ref = self._cache() / "refs" / (self.revision or _library().constants.DEFAULT_REVISION)
        if ".." in ref.parts:
            return
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)
        except OSError as error:  # a cache that this user may only read
            logger.debug("cannot write %s: %s", ref, error)

    def _broken_off(self, error: Exception) -> HeadraceError:
        """What a failure means in the middle of a download, of a model that was there a moment ago."""
        errors, cause = _library().errors, error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
            return self._broken_off(cause)
        lost = isinstance(error, errors.HTTPError) and not isinstance(error, errors.GatedRepoError)
        if not lost or (isinstance(error, errors.HfHubHTTPError) and error.response.status_code in _NO_PERMISSION):
            return self._translated(error)
        endpoint = _library().constants.ENDPOINT
        return EngineError(
            f"model {self.typed!r}: the download from {endpoint} broke off ({first_line(error)}); {_AGAIN}"
        )

    def _translated(self, error: Exception) -> HeadraceError:
        cause = error.__cause__
        if isinstance(error, _library().errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
            return self._translated(cause)  # what kept the hub from being asked
        return self._refusal(error) or self._failure(error)

    def _refusal(self, error: Exception) -> ConfigError | None:
        """An error for an answer of the hub that would be the same next time."""
        hub = _library()
        endpoint, has_token = hub.constants.ENDPOINT, hub.get_token() is not None
        log_in = "log in (hf auth login) or set HF_TOKEN"
        model = f"model {self.typed!r}"
        if isinstance(error, hub.errors.GatedRepoError):
            how = "with the account of your token" if has_token else f"then {log_in}"
            return ConfigError(f"{model} is gated: accept its conditions at {endpoint}/{self.name}, {how}")
        if isinstance(error, hub.errors.RevisionNotFoundError):
            return ConfigError(
                f"{model}: {self.name} has no revision {self.revision!r} at {endpoint}; give a branch, a tag or a "
                "commit, or leave out @ and what follows for the default branch"
            )
        if isinstance(error, hub.errors.RepositoryNotFoundError):
            how = "use a token that may read it" if has_token else log_in
            return ConfigError(
                f"{model}: {self._no_folder}{endpoint} has no such model; check the spelling, or, for a private model, "
                f"{how}"
            )
        if isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code in _NO_PERMISSION:
            return ConfigError(
                f"{model}: {endpoint} refuses the request ({error.response.status_code}): {log_in} with a token that "
                "may read it"
            )
        return None

    def _failure(self, error: Exception) -> EngineError:
        """An error for a failure of the network, the hub or the disk."""
        hub = _library()
        endpoint, model = hub.constants.ENDPOINT, f"model {self.typed!r}"
        web = importlib.import_module(hub.errors.HTTPError.__module__.partition(".")[0])  # the client that it uses
        if isinstance(error, hub.errors.OfflineModeIsEnabled):
            cache = hub.constants.HF_HUB_CACHE
            return EngineError(
                f"{model} is not complete in the cache ({cache}), and HF_HUB_OFFLINE forbids downloads: unset it, or "
                "give a local folder"
            )
        if isinstance(error, hub.errors.HfHubHTTPError):
            status = error.response.status_code
            what = "limits requests" if status == _TOO_MANY else "answers"
            return EngineError(f"{model}: {endpoint} {what} ({status}); try again later")
        if isinstance(error, web.TimeoutException):
            return EngineError(
                f"{model}: {endpoint} did not answer in time; try again, or allow more seconds (HF_HUB_ETAG_TIMEOUT)"
            )
        if isinstance(error, hub.errors.HTTPError):
            return EngineError(
                f"{model}: {self._no_folder}{endpoint} cannot be reached ({first_line(error)}): check network, proxy "
                "and HF_ENDPOINT, or give a local folder"
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EngineError(
                f"{model}: the disk of {hub.constants.HF_HUB_CACHE} is full; free some space, or set HF_HOME to a "
                "folder on a larger disk"
            )
        if isinstance(error, PermissionError):
            return EngineError(f"{model}: cannot write the cache: {first_line(error)}; set HF_HOME to another folder")
        return EngineError(f"{model}: the download failed: {first_line(error)}; {_AGAIN}")


def _library() -> types.ModuleType:
    library: types.ModuleType = require("huggingface_hub", "torch", "a model of the hub")
    for module in ("constants", "errors"):
        importlib.import_module(f"huggingface_hub.{module}")
    return library


def _no_bar() -> type:
    shown: type = importlib.import_module("huggingface_hub.utils").tqdm

    def disabled(bar: object, *values: object, **options: object) -> None:
        shown.__init__(bar, *values, **{**options, "disable": True})  # type: ignore[misc]  # of a subclass of it

    return type("NoBar", (shown,), {"__init__": disabled})
