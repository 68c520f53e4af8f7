"""Uploaded and output files of the Batch API: `ID.jsonl` with its description `ID.json`, in one folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NotRequired, TypedDict

from headrace.io.storage.atomic import atomic_file, sync_folder
from headrace.serving.auth import EVERYBODY, Tenant
from headrace.serving.errors import ApiError
from headrace.wording import shown

logger = logging.getLogger("headrace")

_NEEDED = {"id", "created_at", "purpose"}
_ID = re.compile(r"file-[0-9a-f]{32}")
"""Valid ids. Nothing else reaches the file system."""


class FileDescription(TypedDict):
    """OpenAI's file object, with its owner."""

    id: str
    object: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    owner: str | None
    expires_at: NotRequired[int]
    """When it is deleted; absent if never."""


def now() -> int:
    """The time in Unix seconds, for timestamps and for expiry across restarts."""
    return int(datetime.now(UTC).timestamp())


class FileStore:
    """Stores the files. All methods block on file I/O."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def create(
        self, content: BinaryIO, filename: str, purpose: str, owner: str | None, expires_after_s: int | None = None
    ) -> FileDescription:
        """Store an upload. It is deleted after `expires_after_s` seconds; None for never.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        identity = f"file-{uuid.uuid4().hex}"
        with atomic_file(self._content(identity)) as file:
            shutil.copyfileobj(content, file, 1024 * 1024)
        return self._describe(identity, filename, purpose, owner, expires_after_s)

    def adopt(self, path: Path, seed: str, filename: str, owner: str | None, expires_after_s: int | None = None) -> str:
        """Store an output file of a batch; returns its id, which depends only on `seed`."""
        identity = f"file-{uuid.uuid5(uuid.NAMESPACE_OID, seed).hex}"
        content = self._content(identity)
        if not content.exists():
            os.link(path, content)  # not a move: the process may be killed before the batch is marked as completed
            sync_folder(self._folder)
        self._describe(identity, filename, "batch_output", owner, expires_after_s)
        return identity

    def get(self, identity: str, tenant: Tenant = EVERYBODY) -> FileDescription:
        """The description; raises ApiError 404 if the file does not exist, has expired or belongs to another tenant."""
        if _ID.fullmatch(identity):
            path = self._folder / f"{identity}.json"
            try:
                description: FileDescription = json.loads(path.read_bytes())
                if (
                    tenant.owns(description.get("owner"))
                    and description.keys() >= _NEEDED
                    and description.get("expires_at", math.inf) > now()
                ):
                    return description
            except FileNotFoundError:
                pass
            except (ValueError, AttributeError) as error:
                logger.error("skipping damaged file description %s: %s", path, error)
        raise _not_found(identity)

    def path(self, identity: str, tenant: Tenant = EVERYBODY) -> Path:
        """The path of the content; raises ApiError 404 like `get`."""
        self.get(identity, tenant)
        return self.kept(identity)

    def kept(self, identity: str) -> Path:
        """The path of the content, though the file may have expired; raises ApiError 404 if it is gone."""
        content = self._content(identity)
        if not content.is_file():  # being deleted, or lost
            raise _not_found(identity)
        return content

    def list(self, tenant: Tenant = EVERYBODY) -> list[FileDescription]:
        """The descriptions of a tenant's files, newest first."""
        found = []
        for path in self._folder.glob("file-*.json"):
            with contextlib.suppress(ApiError):  # deleted meanwhile, or another tenant's
                found.append(self.get(path.stem, tenant))
        return sorted(found, key=lambda file: (-file["created_at"], file["id"]))

    def delete_expired(self, in_use: Collection[str]) -> None:
        """Delete files whose time has passed, except those in use."""
        for path in self._folder.glob("file-*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # deleted meanwhile, or damaged
                if path.stem not in in_use and json.loads(path.read_bytes()).get("expires_at", math.inf) <= now():
                    self.forget(path.stem)
                    self.discard(path.stem)

    def forget(self, identity: str) -> None:
        """Delete the description, so that the file is no longer found. `discard` then deletes the content."""
        (self._folder / f"{identity}.json").unlink(missing_ok=True)

    def discard(self, identity: str) -> None:
        """Delete the content of a forgotten file."""
        self._content(identity).unlink(missing_ok=True)

    def _content(self, identity: str) -> Path:
        return self._folder / f"{identity}.jsonl"

    def _describe(
        self, identity: str, filename: str, purpose: str, owner: str | None, expires_after_s: int | None
    ) -> FileDescription:
        description: FileDescription = {
            "id": identity,
            "object": "file",
            "bytes": self._content(identity).stat().st_size,
            "created_at": now(),
            "filename": filename[:200],
            "purpose": purpose,
            "status": "processed",
            "owner": owner,
        }
        if expires_after_s is not None:
            description["expires_at"] = description["created_at"] + expires_after_s
        with atomic_file(self._folder / f"{identity}.json") as file:
            file.write(json.dumps(description).encode())
        return description


def _not_found(identity: str) -> ApiError:
    return ApiError(404, f"there is no file {shown(identity, 80)}", code="file_not_found", param="file_id")
