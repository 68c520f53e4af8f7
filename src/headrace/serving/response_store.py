"""Answers of the Responses API that later requests may continue, each a file with its conversation."""

from __future__ import annotations

import contextlib
import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from headrace.io.storage.atomic import atomic_file
from headrace.records import JsonObject
from headrace.serving.auth import Tenant
from headrace.serving.errors import ApiError
from headrace.wording import shown

_ID = re.compile(r"resp_[0-9a-f]{32}")
"""Valid ids. Nothing else reaches the file system."""
KEPT_S = 30 * 86_400
"""As long as OpenAI keeps them."""
SWEEP_S = 3_600.0
"""How often old ones are looked for."""


class KeptResponse(TypedDict):
    """An answer, and what it continues."""

    owner: str | None
    """The name of the key that asked."""
    messages: list[JsonObject]
    """The conversation, with this answer, without instructions."""
    response: JsonObject


class KeptResponses:
    """Keeps answers in a folder. All methods block on file I/O."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._swept = -SWEEP_S

    def keep(self, kept: KeptResponse) -> None:
        """Store an answer, and delete those whose time has passed.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._path(str(kept["response"]["id"]))) as file:
            file.write(json.dumps(kept).encode())
        if time.monotonic() - self._swept >= SWEEP_S:
            self._swept = time.monotonic()
            for path in self._folder.glob("resp_*.json"):
                with contextlib.suppress(OSError):  # deleted meanwhile
                    if path.stat().st_mtime < datetime.now(UTC).timestamp() - KEPT_S:
                        path.unlink()

    def get(self, identity: str, tenant: Tenant, param: str | None = None) -> KeptResponse:
        """An answer; raises ApiError 404 if it is not kept, or belongs to another tenant."""
        if _ID.fullmatch(identity):
            with contextlib.suppress(FileNotFoundError):
                kept: KeptResponse = json.loads(self._path(identity).read_bytes())
                if tenant.owns(kept["owner"]):
                    return kept
        message = f"there is no response {shown(identity, 80)}: it was never kept, or was deleted"
        raise ApiError(404, message, code="not_found", param=param)

    def delete(self, identity: str, tenant: Tenant) -> None:
        """Delete an answer; raises ApiError 404 like `get`."""
        self.get(identity, tenant)
        self._path(identity).unlink(missing_ok=True)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}.json"
