"""Anthropic's Message Batches: batches of chats, told as its API tells them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from headrace.io.formats.openai_batch import CHAT
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import Json, JsonObject
from headrace.serving.batches.batch import BatchStatus, StoredBatch
from headrace.serving.batches.files import FileStore
from headrace.serving.batches.store import Batches
from headrace.serving.batches.validation import LineRules, problem_of_model
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import RequestFields
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.routes.anthropic import MessagesRequest, answered, error_object, errors
from headrace.serving.routes.batches import disk_error, refuse_unknown_parameters, tenant_of
from headrace.wording import shown

_UNANSWERED = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}
"""What became of requests without an answer; of a batch that failed: errored."""


class BatchEntry(RequestFields):
    """One request of a batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: JsonObject

    def line(self, place: str, rules: LineRules) -> str:
        """The request as a line of a batch file. Raises ApiError: 400 for a field that is not valid."""
        try:
            asked = MessagesRequest.of(self.params)
            asked.refuse_unknown()
            if asked.stream:
                raise ApiError(400, "stream is true: a batch has files of results; leave it out", param="stream")
            if rules.models and (problem := problem_of_model(self.params, rules)):
                raise ApiError(400, problem[1], code=problem[0], param="model")
            body = {name: value for name, value in asked.chat_body().items() if value is not None}
        except ApiError as error:
            field, detail = error.param, error.detail
            where = f"{place}.params" + (f".{field}" if field else "")
            if field and detail.startswith(field):
                detail = f"{place}.params.{detail}"
            raise ApiError(400, detail, code=error.body["error"]["code"], param=where) from None
        return json.dumps({"custom_id": self.custom_id, "method": "POST", "url": CHAT, "body": body}) + "\n"


class MessageBatchRequest(RequestFields):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchEntry], Field(min_length=1, max_length=100_000)]

    def lines(self, rules: LineRules) -> bytes:
        """The requests as a batch file.

        Raises:
            ApiError: 400 for a request that is not valid, or an id that comes twice.
        """
        seen: set[str] = set()
        for at, one in enumerate(self.requests):
            if one.custom_id in seen:
                message = (
                    f"requests.{at}.custom_id is {one.custom_id!r}, as that of an earlier one: each must be unique"
                )
                raise ApiError(400, message, code="duplicate_custom_id", param=f"requests.{at}.custom_id")
            seen.add(one.custom_id)
        return "".join(one.line(f"requests.{at}", rules) for at, one in enumerate(self.requests)).encode()


def message_batches_router(
    files: FileStore, batches: Callable[[], Batches], rules: Callable[[str, str | None], LineRules]
) -> APIRouter:
    """Routes to create, list, read and cancel batches of chats; `rules` are those of an endpoint and an owner."""
    router = APIRouter(
        prefix="/v1/messages/batches", tags=["Anthropic"], responses=error_responses(errors), route_class=DirectRoute
    )

    @router.post("")
    async def create(body: MessageBatchRequest, request: Request) -> Response:
        """Create a batch of messages."""
        tenant = tenant_of(request)
        try:
            content = io.BytesIO(await asyncio.to_thread(body.lines, rules(CHAT, tenant.name)))
            kept = await asyncio.to_thread(files.create, content, "messages.jsonl", "batch", tenant.name)
            batch = batches().create(kept["id"], CHAT, "24h", None, tenant, requests=len(body.requests))
        except OSError as error:
            raise disk_error(error, "a batch") from error
        return JsonReply(_told(batch, request))

    @router.get("")
    async def list_all(request: Request) -> Response:
        """List batches, newest first."""
        every = [_told(one, request) for one in batches().list(tenant_of(request)) if one.endpoint == CHAT]
        return JsonReply(_page(every, request))

    @router.get("/{batch_id}")
    async def describe(request: Request) -> Response:
        """Describe a batch and its progress."""
        return JsonReply(_told(_batch(batches(), request), request))

    @router.post("/{batch_id}/cancel")
    async def cancel(request: Request) -> Response:
        """Cancel a batch. Finished messages are kept."""
        try:
            return JsonReply(_told(batches().cancel(_batch(batches(), request).id, tenant_of(request)), request))
        except OSError as error:
            raise disk_error(error, "the end of a batch") from error

    _add_results(router, files, batches)
    for route in router.routes:
        if isinstance(route, DirectRoute):
            route.shape = errors
    return router


def _add_results(router: APIRouter, files: FileStore, batches: Callable[[], Batches]) -> None:
    @router.get("/{batch_id}/results", responses={200: {"content": {"application/x-jsonl": {}}}})
    async def results(request: Request) -> Response:
        """The results of a batch that has ended, as JSON Lines."""
        batch = _batch(batches(), request)
        if batch.status.is_open:
            message = f"batch {request.path_params['batch_id']} has not ended: its results are not there yet"
            raise ApiError(404, message, code="batch_not_ended", param="batch_id")
        return StreamingResponse(_results(batch, files), media_type="application/x-jsonl")


def _batch(batches: Batches, request: Request) -> StoredBatch:
    """The batch that a path names. Raises ApiError: 404 if there is none of chats."""
    asked = request.path_params["batch_id"]
    with suppress(ApiError):
        found = batches.get(asked.removeprefix("msg"), tenant_of(request))
        if found.endpoint == CHAT:
            return found
    raise ApiError(404, f"there is no batch {shown(asked, 80)} of chats", code="batch_not_found", param="batch_id")


def _told(batch: StoredBatch, request: Request) -> JsonObject:
    """The batch as Anthropic's API has it."""
    at, counts, is_open = batch.times, batch.counts, batch.status.is_open
    identity, rest = f"msg{batch.id}", max(batch.counts.total - batch.counts.completed - batch.counts.failed, 0)
    ended = max((at[one] for one in at if not one.is_open), default=None)
    tally = {"processing": 0, "succeeded": counts.completed, "errored": counts.failed, "canceled": 0, "expired": 0}
    tally["processing" if is_open else _UNANSWERED.get(batch.status, "errored")] += rest
    canceling = batch.status is BatchStatus.CANCELLING
    return {
        "id": identity,
        "type": "message_batch",
        "processing_status": "canceling" if canceling else "in_progress" if is_open else "ended",
        "request_counts": tally,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": None if is_open else _time(ended),
        "cancel_initiated_at": _time(at.get(BatchStatus.CANCELLING)),
        "archived_at": None,
        "results_url": None if is_open else f"{_base(request)}v1/messages/batches/{identity}/results",
    }


def _base(request: Request) -> object:
    """Where the client finds the API: a proxy that takes a path off says so."""
    before = request.headers.get("x-forwarded-prefix", "").strip("/")
    return request.base_url.replace(path=f"/{before}{request.base_url.path}") if before else request.base_url


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(every: Sequence[JsonObject], request: Request) -> JsonObject:
    """One page of a list: what follows `after_id`, or the last before `before_id`."""
    refuse_unknown_parameters(request, "limit", "after_id", "before_id", "beta")  # Anthropic's clients may send beta
    asked, ids = request.query_params, [one["id"] for one in every]
    limit, after, before = asked.get("limit", "20"), asked.get("after_id"), asked.get("before_id")
    if not (limit.isdecimal() and 1 <= int(limit) <= 1_000):
        raise ApiError(400, f"limit is {shown(limit, 40)}: it must be from 1 to 1000", code="bad_limit", param="limit")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise ApiError(404, f"{name} is {shown(given, 80)}: there is no such batch", code="bad_id", param=name)
    if after is not None and before is not None:
        raise ApiError(400, "after_id and before_id are given: give one of them", code="bad_id", param="before_id")
    end, size = len(ids) if before is None else ids.index(before), int(limit)
    start = ids.index(after) + 1 if after is not None else 0 if before is None else max(end - size, 0)
    page = every[start:end][:size]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start > 0 if before is not None else start + len(page) < end,
    }


def _results(batch: StoredBatch, files: FileStore) -> Iterator[str]:
    """The lines of the results. Blocks."""
    seen: set[object] = set()
    for file in (batch.output_file_id, batch.error_file_id):
        for row in _rows(files, file):
            seen.add(row["custom_id"])
            yield _line(row["custom_id"], _result(row))
    unanswered: JsonObject = {"type": _UNANSWERED.get(batch.status, "errored")}
    if unanswered["type"] == "errored":
        why = "; ".join(str(error["message"]) for error in batch.errors) or "the batch failed"
        unanswered["error"] = error_object("invalid_request_error", why)
    for row in _rows(files, batch.input_file_id):
        if row["custom_id"] not in seen:
            yield _line(row["custom_id"], unanswered)


def _rows(files: FileStore, file: str | None) -> Iterator[JsonObject]:
    if file is not None:
        with files.kept(file).open(encoding="utf-8") as lines:
            yield from map(json.loads, filter(str.strip, lines))


def _line(identity: object, result: JsonObject) -> str:
    return json.dumps({"custom_id": identity, "result": result}) + "\n"


def _result(row: JsonObject) -> JsonObject:
    """What became of a request, from its line in OpenAI's files."""
    error: Json = row["error"]
    if error is not None:
        kind = "api_error" if error["type"] == "server_error" else error["type"]
        return {"type": "errored", "error": error_object(kind, error["message"])}
    response: Json = row["response"]
    body = response["body"]
    [choice, *_], usage = body["choices"], body["usage"]
    message, details = choice["message"], usage.get("prompt_tokens_details") or {}
    answer = GeneratorAnswer(
        text=message["content"] or "",
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        reasoning=message.get("reasoning", ""),
        tool_calls=message.get("tool_calls", ()),
    )
    return {"type": "succeeded", "message": answered(f"msg_{body['id']}", body["model"], answer)}
