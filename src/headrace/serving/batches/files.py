"""Uploaded and produced files of the Batch API, in one folder: `ID.jsonl` with its description `ID.json` beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from headrace.io.storage.parts import atomic_file, sync_folder
from headrace.serving.auth import EVERYBODY, Tenant
from headrace.serving.errors import ApiError

logger = logging.getLogger("headrace")

_NEEDED = {"id", "created_at", "purpose"}
_ID = re.compile(r"file-[0-9a-f]{32}")
"""What a request may name: nothing else reaches the file system."""


def now() -> int:
    """Seconds of the epoch, as OpenAI's objects have them: for people and for expiry across restarts."""
    return int(datetime.now(UTC).timestamp())


class FileStore:
    """All methods block: they do file I/O."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def create(self, content: BinaryIO, filename: str, purpose: str, owner: str | None) -> dict[str, Any]:
        """Keep an upload.

        Raises:
            OSError: there is no room.
        """
        identity = f"file-{uuid.uuid4().hex}"
        with atomic_file(self._content(identity)) as file:
            shutil.copyfileobj(content, file, 1024 * 1024)
        return self._describe(identity, filename, purpose, owner)

    def adopt(self, path: Path, seed: str, filename: str, owner: str | None) -> str:
        """Keep a file that a batch has made, under an id that is the same each time it is adopted; returns the id."""
        identity = f"file-{uuid.uuid5(uuid.NAMESPACE_OID, seed).hex}"
        content = self._content(identity)
        if not content.exists():
            os.link(path, content)  # not a move: a kill may come before it is noted that the batch is done
            sync_folder(self._folder)
        self._describe(identity, filename, "batch_output", owner)
        return identity

    def get(self, identity: str, tenant: Tenant = EVERYBODY) -> dict[str, Any]:
        """The description; raises ApiError 404 where there is none, or none that this tenant may know of."""
        if _ID.fullmatch(identity):
            path = self._folder / f"{identity}.json"
            try:
                description: dict[str, Any] = json.loads(path.read_bytes())
                if tenant.owns(description.get("owner")) and description.keys() >= _NEEDED:
                    return description
            except FileNotFoundError:
                pass
            except (ValueError, AttributeError) as error:
                logger.error("file description %s is damaged and left out: %s", path, error)
        raise _not_found(identity)

    def path(self, identity: str, tenant: Tenant = EVERYBODY) -> Path:
        """Where the content is; raises ApiError 404 as `get` does."""
        self.get(identity, tenant)
        content = self._content(identity)
        if not content.is_file():  # it is being deleted, or was lost
            raise _not_found(identity)
        return content

    def list(self, tenant: Tenant = EVERYBODY) -> list[dict[str, Any]]:
        """The descriptions of a tenant's files, the newest first."""
        found = []
        for path in self._folder.glob("file-*.json"):
            with contextlib.suppress(ApiError):  # deleted meanwhile, or another's
                found.append(self.get(path.stem, tenant))
        return sorted(found, key=lambda file: (-int(file["created_at"]), str(file["id"])))

    def forget(self, identity: str) -> None:
        """Take a file's name away: from now on nobody finds it. `discard` then frees its room."""
        (self._folder / f"{identity}.json").unlink(missing_ok=True)

    def discard(self, identity: str) -> None:
        """Delete the content of a forgotten file."""
        self._content(identity).unlink(missing_ok=True)

    def _content(self, identity: str) -> Path:
        return self._folder / f"{identity}.jsonl"

    def _describe(self, identity: str, filename: str, purpose: str, owner: str | None) -> dict[str, Any]:
        description = {
            "id": identity,
            "object": "file",
            "bytes": self._content(identity).stat().st_size,
            "created_at": now(),
            "filename": filename[:200],
            "purpose": purpose,
            "status": "processed",
            "owner": owner,
        }
        with atomic_file(self._folder / f"{identity}.json") as file:
            file.write(json.dumps(description).encode())
        return description


def _not_found(identity: str) -> ApiError:
    return ApiError(404, f"there is no file {identity!r:.80}", code="file_not_found", param="file_id")
