"""OpenAI's Batch API: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

from headrace.records import JsonObject
from headrace.serving.auth import EVERYBODY, Tenant
from headrace.serving.batches.files import FileStore
from headrace.serving.batches.store import Batches
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute, check_type
from headrace.serving.protocol.requests import RequestFields, StrictFields
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS, Batch, BatchList, Deleted, File, FileList
from headrace.wording import shown

logger = logging.getLogger("headrace")

FilesLimit = Annotated[int, Query(ge=1, le=10_000)]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=100)]

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


Seconds = Annotated[int, Field(ge=3_600, le=2_592_000)]


class ExpiresAfter(StrictFields):
    """When output files are deleted: some seconds after they were made."""

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchRequest(RequestFields):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def files_router(files: FileStore, max_bytes: int, batches: Callable[[], Batches]) -> APIRouter:
    """Routes to upload, list, read and delete files."""
    routes = APIRouter(tags=["batches"], responses=ERRORS)

    @routes.post("/v1/files", response_model=File)
    async def create(
        request: Request,
        file: UploadFile,
        purpose: Annotated[Literal["batch"], Form()],
        anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
        seconds: Annotated[Seconds | None, Form(alias="expires_after[seconds]")] = None,
    ) -> Response:
        """Upload a batch file (JSON Lines)."""
        if "headrace_caller" not in request.scope:  # a page of another site knows no key
            check_type(request.scope["headers"], any_type=True)
        await _refuse_unknown_parts(request)
        if (anchor is None) != (seconds is None):
            message = "expires_after needs both anchor (created_at) and seconds"
            raise ApiError(400, message, code="missing", param="expires_after")
        _check_size(file.size or 0, max_bytes)
        try:
            name, owner = file.filename or "upload.jsonl", tenant_of(request).name
            kept = await asyncio.to_thread(files.create, file.file, name, purpose, owner, seconds)
        except OSError as error:
            raise disk_error(error, f"this file of {file.size:,} bytes") from error
        return JsonReply(kept)

    @routes.get("/v1/files", response_model=FileList)
    async def list_all(
        request: Request,
        limit: FilesLimit = 100,
        after: After = None,
        purpose: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List files, newest first; with `order=asc`, oldest first."""
        refuse_unknown_parameters(request, "limit", "after", "purpose", "order")
        found = await asyncio.to_thread(files.list, tenant_of(request))
        found = [file for file in found if purpose in (None, file["purpose"])]
        return JsonReply(_page(found if order == "desc" else found[::-1], limit, after))

    @routes.get("/v1/files/{file_id}", response_model=File)
    async def describe(request: Request, file_id: str) -> Response:
        """Describe a file."""
        return JsonReply(await asyncio.to_thread(files.get, file_id, tenant_of(request)))

    @routes.get("/v1/files/{file_id}/content", responses={200: {"content": {"application/jsonl": {}}}})
    async def content(request: Request, file_id: str) -> FileResponse:
        """Download a file."""
        path = await asyncio.to_thread(files.path, file_id, tenant_of(request))
        return _Content(path, media_type="application/jsonl")

    @routes.delete("/v1/files/{file_id}", response_model=Deleted)
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file. Returns 409 if a running batch uses it."""
        batches().release(file_id, tenant_of(request))  # on the event loop, so that no batch can start in between
        await asyncio.to_thread(files.discard, file_id)
        return JsonReply({"id": file_id, "object": "file", "deleted": True})

    return routes


def batches_router(batches: Callable[[], Batches]) -> APIRouter:
    """Routes to create, list, read and cancel batches."""
    routes = APIRouter(tags=["batches"], responses=ERRORS)

    async def create(body: BatchRequest, request: Request) -> Response:
        """Create a batch from an uploaded file."""
        given = body.input_file_id, body.endpoint, body.completion_window, body.metadata
        expires = body.output_expires_after
        try:
            batch = batches().create(*given, tenant_of(request), None if expires is None else expires.seconds)
        except OSError as error:
            raise disk_error(error, "a batch") from error
        return JsonReply(batch.as_json())

    routes.add_api_route(
        "/v1/batches", create, methods=["POST"], response_model=Batch, route_class_override=DirectRoute
    )

    @routes.get("/v1/batches", response_model=BatchList)
    async def list_all(request: Request, limit: Limit = 20, after: After = None) -> Response:
        """List batches, newest first."""
        refuse_unknown_parameters(request, "limit", "after")
        return JsonReply(_page([batch.as_json() for batch in batches().list(tenant_of(request))], limit, after))

    @routes.get("/v1/batches/{batch_id}", response_model=Batch)
    async def describe(request: Request, batch_id: str) -> Response:
        """Describe a batch and its progress."""
        return JsonReply(batches().get(batch_id, tenant_of(request)).as_json())

    @routes.post("/v1/batches/{batch_id}/cancel", response_model=Batch)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch. Finished records are kept."""
        try:
            return JsonReply(batches().cancel(batch_id, tenant_of(request)).as_json())
        except OSError as error:
            raise disk_error(error, "the end of a batch") from error

    return routes


class _Content(FileResponse):
    """A file response. HEAD requests arrive as GET and get the headers only."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "method": "HEAD"} if "headrace_head" in scope else scope, receive, send)


def _check_size(size: int, max_bytes: int) -> None:
    if not size:
        raise ApiError(400, "the file is empty", code="empty", param="file")
    if size > max_bytes:
        raise ApiError(413, f"the file is longer than the {max_bytes:,} bytes allowed", code="too_long")


async def _refuse_unknown_parts(request: Request) -> None:
    known = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
    for name in (await request.form()).keys() - set(known):
        message = f"unknown field {shown(name)}; known: {', '.join(known)}"
        raise ApiError(400, message, code="unknown_field", param=f"{name:.60}")


def refuse_unknown_parameters(request: Request, *known: str) -> None:
    """Raise 400 for a parameter of the address that is not known."""
    for name in request.query_params.keys() - set(known):
        message = f"unknown parameter {shown(name)}; known: {', '.join(known)}"
        raise ApiError(400, message, code="unknown_field", param=f"{name:.60}")


def tenant_of(request: Request) -> Tenant:
    """The owner of a request's files, batches and answers."""
    tenant: Tenant = request.scope.get("headrace_tenant", EVERYBODY)
    return tenant


def disk_error(error: OSError, what: str) -> ApiError:
    """Convert a failed write to a response, and log it: the client cannot mend it."""
    logger.error("cannot store %s: %s", what, error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    why = "its disk is full" if full else "its disk cannot be written"
    message = f"the server cannot store {what} now: {why}"
    return ApiError(507 if full else 503, message, code="storage", retry_after_s=60)


def _page(entries: Sequence[Mapping[str, object]], limit: int, after: str | None) -> JsonObject:
    """One page of a list. If `after` was deleted, the page starts at the beginning."""
    if after is not None and not _ID.fullmatch(after):
        raise ApiError(
            400, f"after is {shown(after, 80)}: it must be the id of a file or batch", code="bad_id", param="after"
        )
    ids = [entry["id"] for entry in entries]
    start = ids.index(after) + 1 if after in ids else 0
    page = entries[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(entries),
    }
